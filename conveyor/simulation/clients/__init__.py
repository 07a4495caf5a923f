"""Clients: concurrent callers of the API that use everything it offers."""
