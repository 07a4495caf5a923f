"""Attacks on a running server by malicious callers, sites and gateways, and by failing disks."""
