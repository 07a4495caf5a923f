"""Marks the secrets that clients send: a checker that finds the marker where it does not belong has
found a leak (I45)."""

from __future__ import annotations

MARK = "canary4711"


def secret_of(tenant: str, what: str) -> str:
    return f"{MARK}-{what}-{tenant}"
