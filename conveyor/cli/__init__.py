"""The command line: one file per command (docs/operations.md, Roles)."""
