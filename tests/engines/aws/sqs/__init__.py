"""Tests of conveyor/engines/aws/sqs."""
