"""Adapters that speak HTTP to the world: two gateways and the webhook notifier (SPEC 6.3, 6.6)."""
