"""The laws of Queue, for every engine's queue and for SQS (docs/architecture.md, Discovery)."""
