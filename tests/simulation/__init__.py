"""Tests of the simulator: its traces are reproducible, its faults occur, its checkers report."""
