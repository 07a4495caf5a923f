"""The domain: pure values and decisions; no I/O, no clock, no randomness of its own (SPEC.md 2)."""
