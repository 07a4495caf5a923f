"""Adapters that make HTTP calls: two gateways and the webhook notifier (SPEC.md 4.16;
docs/engines.md, Gateways)."""
