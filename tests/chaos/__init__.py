"""Chaos tests: the real program is killed at call sites and at random, or finds torn files."""
