"""Cache: counters that were read recently, for GET requests (docs/engines.md, Counter cache).

It saves reads and never protects correctness. Losing all of its contents is harmless.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class CachedValue(msgspec.Struct, frozen=True):
    text: str


class ReadTicket(msgspec.Struct, frozen=True):
    """The right to store a value that is read from now on, until another ticket of the name is
    issued."""

    token: str


class Cache(Protocol):
    """Laws:

    - A value that is found was stored under the same name and version.
    - It was read after its ticket was issued, and is found for `ttl_s` from then on.
    - Only the newest ticket of a name can store a value, and only if the name was not deleted
      since.
    - While a ticket is issued, other readers find nothing and get no ticket, unless they insist.
    - A `put` with an outdated ticket stores nothing and returns the current value. If there is
      none, values that were read before are never found.
    - Any method may raise Unavailable.

    So a reader that shows what it found, or what it read after `put` or `delete` has returned,
    shows nothing older than what any reader has shown before.
    """

    async def get(
        self, name: str, version: str, *, ttl_s: float, insists: bool = False
    ) -> CachedValue | ReadTicket | None:
        """Returns the value, a ticket to read it, or None while another reader has the ticket."""

    async def put(self, name: str, ticket: ReadTicket, text: str) -> CachedValue | None:
        """Stores what was read under the ticket. If the ticket is outdated, returns the current
        value."""

    async def delete(self, name: str) -> None:
        """Values that were read before are not found any more."""
