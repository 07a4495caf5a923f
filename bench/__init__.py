"""Benchmarks: one file per question, all arms in one process, answers as ratios."""
