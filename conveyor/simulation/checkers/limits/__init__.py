"""Checkers of caps, budgets, quotas and fairness."""
