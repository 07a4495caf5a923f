"""Conveyor: a durable inbox for scrape jobs (SPEC.md 1)."""

__version__ = "0.1.0"
