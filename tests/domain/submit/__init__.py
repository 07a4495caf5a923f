"""Tests of conveyor/domain/submit."""
