"""Clients: callers of the API who do everything that it offers, at once and again and again."""
