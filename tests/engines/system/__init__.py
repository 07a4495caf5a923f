"""Tests of the clocks and the secret box."""
