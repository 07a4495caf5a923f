"""Faults: what happens to processes, clocks, disks and calls, and when."""
