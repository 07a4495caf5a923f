"""The HTTP API: reads requests, calls use cases, writes answers (SPEC 4)."""

from __future__ import annotations

from conveyor.api.app import make_app
from conveyor.api.auth import Authenticator, KeyList, Passthrough, Principal

__all__ = ["Authenticator", "KeyList", "Passthrough", "Principal", "make_app"]
