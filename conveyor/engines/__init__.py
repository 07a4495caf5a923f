"""The engines: adapters that implement the ports; strangers to each other (SPEC 5)."""
