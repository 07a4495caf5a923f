"""Crash injection: the product with its ports wrapped, for tests that end a process."""
