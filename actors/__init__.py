"""The actors of a Conveyor worker, on a runtime of their own (SPEC 6)."""
