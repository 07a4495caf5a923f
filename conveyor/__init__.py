"""Conveyor: a durable batch-scraping service (SPEC.md 1)."""

__version__ = "0.1.0"
# For sites, receivers of webhooks and buckets. They need not change their rules for each patch.
USER_AGENT = f"conveyor/{__version__.rpartition('.')[0]}"
