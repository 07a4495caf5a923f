"""The actors of a Conveyor worker, on a runtime of their own (docs/architecture.md, The worker)."""
