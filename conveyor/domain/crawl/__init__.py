"""Crawls: the pure rules of following links (docs/crawls.md)."""
