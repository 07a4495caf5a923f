"""The engines: adapters that implement the ports; strangers to each other (docs/engines.md)."""
