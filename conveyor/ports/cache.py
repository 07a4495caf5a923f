"""Cache: what was read a moment ago, for those who only look (docs/engines.md, Counter cache).

It saves reads and never guards truth. Forgetting everything in it is harmless.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class CachedValue(msgspec.Struct, frozen=True):
    text: str


class ReadTicket(msgspec.Struct, frozen=True):
    """The right to keep what is read from now on, until somebody else is given one."""

    token: str


class Cache(Protocol):
    """Laws:

    - What is found was kept under the same name and version.
    - It was read after its ticket was given out, and is found for `ttl_s` from then on.
    - Only the last ticket of a name keeps anything, and only while nobody has forgotten the name.
    - While a ticket is out, others find nothing and get none, unless they insist.
    - Who keeps too late is answered what stands, if anything does; else nothing will stand that was
      read before.
    - Any method may raise Unavailable.

    So who shows what it found, or what it read once `keep` or `forget` has returned, shows nothing
    that is older than what anybody has shown before.
    """

    async def get(
        self, name: str, version: str, *, ttl_s: float, insists: bool = False
    ) -> CachedValue | ReadTicket | None:
        """None while somebody else reads it."""

    async def put(self, name: str, ticket: ReadTicket, text: str) -> CachedValue | None:
        """Keeps what was read under the ticket; answers what stands instead, if that is late."""

    async def delete(self, name: str) -> None:
        """What was read before is found no more."""
