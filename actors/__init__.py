"""The actors of a Conveyor worker, on their own runtime (docs/architecture.md, The worker)."""
