"""Faults: what can happen to processes, clocks, disks and calls, and when it does."""
