"""The engines: adapters of the ports, which do not import one another (docs/engines.md)."""
