"""Packs on S3: bodies of one prefix that end at about the same time become one object
(docs/storage.md, S3 objects; decision 0027).

The problem: S3 bills each PUT. A million pages of one object each cost 5 USD, more than all other
calls for them together.

A body is still whole or absent:

- `add` returns when the object is stored. A worker that dies before has settled none of its bodies.
- An object is written once, under a random name, with all its bodies. A repeated PUT writes the
  same bytes.
- A pack belongs to one prefix. So the bodies of a run are deleted together, by their prefix.

No task of its own sends a pack: one of the callers that wait for it does. If that caller is
cancelled, another one goes on, so the bodies of the others are not lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio
from trio.lowlevel import ParkingLot

from conveyor.domain import limits
from conveyor.domain.ids import Random
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.packed_key import Part
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import Unavailable

# Larger bodies have objects of their own: they gain little, and would make others wait for them.
PACKED_BYTES_MAX = 1024 * 1024
# With 100 bodies a PUT costs 1 % of what it did. Larger packs save less and less, and lose more
# pages if a worker is killed.
BODIES_MAX = 100
PACK_BYTES_MAX = 8 * 1024 * 1024
# Packs on their way are a second copy of their bodies in memory.
SENDING_BYTES_MAX = 2 * PACK_BYTES_MAX

# A pack that gets nothing for this share of its wait gets little more: the last pages of a run do
# not wait for pages that do not come. A smaller share sends packs of slow runs too early.
QUIET_SHARE = 0.25

Put = Callable[[str, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Packing:
    """A pack waits for `wait_s`, until it is full, until no body has come for `quiet_s`, or until
    `waiting_max` bodies wait in all packs. With 0 s each body is an object.
    """

    wait_s: float = limits.PACK_WAIT_MS / 1000
    waiting_max: int = 2 * limits.CONCURRENCY

    @property
    def quiet_s(self) -> float:
        return self.wait_s * QUIET_SHARE

    @classmethod
    def of(cls, *, wait_ms: int, concurrency: int) -> Packing:
        """Of the tasks that may write (`BatchingConfig.writing_share`), two thirds may wait for a
        pack, so that no fetch waits for it."""
        return cls(wait_ms / 1000, waiting_max=2 * concurrency)


DEFAULT_PACKING = Packing()


@dataclass(slots=True, eq=False)
class _Pack:
    """`turns` are the callers that wait while one of them, the sender, leads."""

    prefix: str
    name: str
    closes_at: float
    quiet_at: float
    bodies: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    callers: int = 0
    closed: trio.Event = field(default_factory=trio.Event)
    turns: ParkingLot = field(default_factory=ParkingLot)
    is_led: bool = False
    is_stored: bool = False
    error: Exception | None = None

    @property
    def key(self) -> str:
        return Part(self.prefix, self.name, 0, 0).pack_key

    @property
    def due_at(self) -> float:
        return min(self.closes_at, self.quiet_at)

    def append(self, body: bytes) -> Part:
        part = Part(self.prefix, self.name, self.size_bytes, len(body))
        self.bodies.append(body)
        self.size_bytes += len(body)
        return part

    def has_room(self, size_bytes: int) -> bool:
        return self.size_bytes + size_bytes <= PACK_BYTES_MAX and len(self.bodies) < BODIES_MAX


@dataclass(slots=True, eq=False)
class Packs:
    """The packs of one process. `put` stores one object."""

    put: Put
    random: Random
    packing: Packing
    _open: dict[str, _Pack] = field(default_factory=dict)
    _waiting_count: int = 0
    _sending_bytes: int = 0
    _sent: ParkingLot = field(default_factory=ParkingLot)

    async def add(self, prefix: str, body: bytes) -> Stored:
        """Returns when the body is stored. If the pack cannot be stored, each caller gets the
        error."""
        pack = self._pack_for(prefix, len(body))
        part = pack.append(body)
        pack.quiet_at = trio.current_time() + self.packing.quiet_s
        self._waiting_count += 1
        self._close_full(pack)
        pack.callers += 1
        try:
            while not pack.is_stored and pack.error is None:
                if pack.is_led:
                    await pack.turns.park()
                else:
                    await self._lead(pack)
        finally:
            pack.callers -= 1
            # A pack without callers is not stored: no caller would learn its keys.
            if not pack.callers:
                self._close(pack)
        if pack.error is not None:
            raise pack.error
        return Stored(part.key, part.size_bytes, hashlib.sha256(body).hexdigest())

    def _pack_for(self, prefix: str, size_bytes: int) -> _Pack:
        pack = self._open.get(prefix)
        if pack is not None and pack.has_room(size_bytes):
            return pack
        if pack is not None:
            self._close(pack)
        name = f"{self.random.getrandbits(64):016x}"
        closes_at = trio.current_time() + self.packing.wait_s
        pack = _Pack(prefix, name, closes_at, quiet_at=closes_at)
        self._open[prefix] = pack
        return pack

    def _close_full(self, pack: _Pack) -> None:
        if not pack.has_room(1):
            self._close(pack)
        elif self._waiting_count >= self.packing.waiting_max:
            # The oldest one: its bodies have waited the longest.
            self._close(next(iter(self._open.values())))

    def _close(self, pack: _Pack) -> None:
        """Ends the wait of a pack. The next body of its prefix starts another one."""
        if self._open.get(pack.prefix) is pack:
            del self._open[pack.prefix]
            self._waiting_count -= len(pack.bodies)
            pack.closed.set()

    async def _lead(self, pack: _Pack) -> None:
        pack.is_led = True
        try:
            while not pack.closed.is_set() and trio.current_time() < pack.due_at:
                with trio.move_on_at(pack.due_at):
                    await pack.closed.wait()
            self._close(pack)
            await self._send(pack)
        except (Unavailable, AwsError) as error:
            pack.error = error
        else:
            pack.is_stored = True
        finally:
            # Also if this caller was cancelled: another one leads then, and sends the same object.
            pack.is_led = False
            pack.turns.unpark_all()

    async def _send(self, pack: _Pack) -> None:
        while self._sending_bytes and self._sending_bytes + pack.size_bytes > SENDING_BYTES_MAX:
            await self._sent.park()
        self._sending_bytes += pack.size_bytes
        try:
            await self.put(pack.key, b"".join(pack.bodies))
        finally:
            self._sending_bytes -= pack.size_bytes
            self._sent.unpark_all()
