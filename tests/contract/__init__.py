"""The public contract: its SDK, its schemas and the project's own description, each with a real
server."""
