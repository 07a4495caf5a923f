"""The use cases: load, decide, commit; they spawn nothing (docs/api.md;
docs/architecture.md, The worker)."""
