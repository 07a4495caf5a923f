"""Benchmarks: each file answers one question, as ratios between arms that one command runs."""
