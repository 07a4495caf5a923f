"""Tests of the run poller with real actors around it."""
