"""The HTTP API: reads requests, calls use cases, writes answers (docs/api.md)."""
