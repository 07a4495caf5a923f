"""Tests of conveyor/usecases/run."""
