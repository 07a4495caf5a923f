"""The trace of a simulated world, its format and its summary."""
