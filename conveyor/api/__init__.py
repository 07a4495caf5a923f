"""The HTTP API: reads requests, calls use cases, writes answers (SPEC 4)."""
