"""The public contract: its SDK, its schemas and our own description, each against a real server."""
