"""Tests of conveyor/engines/aws/s3."""
