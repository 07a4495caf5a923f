"""Adapters that make HTTP calls: gateways, proxies, webhooks and the delivery of exports
(SPEC.md 4.16, 4.19; docs/engines.md, Gateways)."""
