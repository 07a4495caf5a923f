"""Tests of conveyor/domain/run."""
