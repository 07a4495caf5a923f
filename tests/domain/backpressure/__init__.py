"""Tests of conveyor/domain/backpressure."""
