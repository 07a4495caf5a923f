"""Tests of conveyor/usecases/submit."""
