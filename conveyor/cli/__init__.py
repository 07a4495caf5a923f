"""The command line: one file per command (SPEC 1.2)."""
