"""What happens to a run from its ingestion to its removal."""
