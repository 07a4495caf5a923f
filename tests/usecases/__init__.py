"""Tests of the use cases with the memory engine, and with faults wrapped around it."""
