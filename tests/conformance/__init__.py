"""The laws of each port, run by every engine (docs/engines.md)."""
