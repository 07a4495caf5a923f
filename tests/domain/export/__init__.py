"""Tests of conveyor/domain/export."""
