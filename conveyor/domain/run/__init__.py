"""The life of a run: ingestion, settlement, counters, termination."""
