"""Adapters that speak HTTP to the world: two gateways and the webhook notifier (SPEC.md 4.16;
docs/engines.md, Gateways)."""
