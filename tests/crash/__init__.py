"""Crash injection: runs the product with wrapped ports that can end its process at any call."""
