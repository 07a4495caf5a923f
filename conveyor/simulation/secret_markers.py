"""Canaries: the secrets that clients hand over. Whoever finds the mark of one where it does not
belong has found a leak (I45)."""

from __future__ import annotations

MARK = "canary4711"


def secret_of(tenant: str, what: str) -> str:
    return f"{MARK}-{what}-{tenant}"
