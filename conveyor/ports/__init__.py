"""The ports: what Conveyor needs from the world, Protocols whose docstrings are laws
(docs/engines.md)."""
