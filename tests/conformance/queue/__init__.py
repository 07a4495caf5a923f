"""The laws of Queue, for every engine's queue and for SQS (SPEC 6.1)."""
