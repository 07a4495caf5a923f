"""The laws of each port, run by every engine (SPEC 5)."""
