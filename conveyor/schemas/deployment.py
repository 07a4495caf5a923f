"""What `conveyor check` reports of a deployment."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One checked item. `problem` is None if it is in order; then there is no remedy."""

    name: str
    problem: str | None = None
    remedy: str = ""
