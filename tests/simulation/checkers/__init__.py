"""Tests of each checker alone: what it must report, and what it must accept."""
