"""Queues of the AWS engine, on SQS."""
