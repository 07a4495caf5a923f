"""The poller of one run: permits, receiving, host limits and the budget (SPEC.md 4.6)."""
