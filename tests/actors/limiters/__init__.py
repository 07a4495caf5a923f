"""Tests of the limiters in actors."""
