"""The use cases: load, decide, commit; they spawn nothing (SPEC 4, 6)."""
