"""Exports: their progress, and the formats of their files."""
