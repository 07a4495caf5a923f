"""Exports: their rows, their progress, and the formats of their files."""
