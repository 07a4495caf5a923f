"""The ports: what Conveyor needs from outside, as Protocols with laws in their docstrings
(docs/engines.md)."""
