"""The composition root: builds a process from its settings (docs/architecture.md, Layers)."""
