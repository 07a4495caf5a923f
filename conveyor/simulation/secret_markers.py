"""Markers: the secrets that clients send. A checker that finds a marker where it does not belong
has found a leak (I45)."""

from __future__ import annotations

MARK = "canary4711"


def secret_of(tenant: str, what: str) -> str:
    return f"{MARK}-{what}-{tenant}"
