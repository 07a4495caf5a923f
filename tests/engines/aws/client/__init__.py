"""Tests of conveyor/engines/aws/client."""
