"""The simulator: it repeats itself, its faults strike, and the program survives it."""
