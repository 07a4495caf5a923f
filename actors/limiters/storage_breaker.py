"""StorageBreaker: stops fetching while pages cannot be written, and tests the storage
(SPEC.md 4.11).

Each process has one. A page that was fetched and cannot be written is held in memory, because it
has been paid for. While the circuit is open, pollers receive nothing. The writes of held pages, one
at a time, are the probes; a process that holds no page puts a small body instead. Pollers continue
when the circuit is closed and every held page is written, so that the recovered storage does not
get the full load at once.
"""

from __future__ import annotations

import logging

import trio

from conveyor.domain import limits
from conveyor.domain.backpressure.circuit import Circuit, ProbePolicy
from conveyor.domain.ids import Random
from conveyor.ports.blobs import Blobs
from conveyor.ports.errors import StorageFull, Unavailable, is_resource_shortage

log = logging.getLogger(__name__)

# One failure may be a single lost call, which is retried. Several in a row are an outage. A larger
# number fetches more pages that must then be held.
FAILURES_MAX = 3
# `first_s` is short, so that fetching resumes soon after a short outage; `delay_s_max` limits the
# number of calls during a long one. `lost_after_s` must exceed the longest write: 60 s for a call
# to S3 plus the writer's own retries. After it, another probe may start.
PROBES = ProbePolicy(first_s=0.5, delay_s_max=10.0, lost_after_s=90.0)
# Held pages are written within seconds once the storage is available. A page that still fails alone
# stops the fetches of all others for at most this long.
RECOVER_S_MAX = 30.0
PROBE_PREFIX = "probes"
# About the size of a page. On full storage a body of a few bytes may succeed although no page fits.
PROBE_BYTES = 64 * 1024
_FULL = "the storage is full; nothing is fetched until there is room"
_UNAVAILABLE = "pages cannot be stored now; nothing is fetched until they can be"


class StorageBreaker:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._circuit = Circuit(policy=PROBES)
        self._failures = 0
        self._is_recovering = False
        self._closed_at = 0.0
        self._changed = trio.Event()
        self.held_count = 0
        self.held_bytes = 0
        self.detail = _UNAVAILABLE

    @property
    def is_open(self) -> bool:
        """Returns whether nothing may be fetched now."""
        if not self._circuit.is_closed:
            return True
        return self._is_recovering and trio.current_time() < self._closed_at + RECOVER_S_MAX

    def may_fetch(self, blobs: Blobs) -> bool:
        """Returns whether a page may be fetched now: the circuit is closed and the storage has
        room."""
        if not self.is_open:
            try:
                blobs.check_room()
            except Unavailable as error:
                self.note_failure(error)
                return False
        return not self.is_open

    def note_success(self, probe: int | None = None) -> None:
        """Records that a page was written; `probe` is its probe number, if it was one."""
        self._failures = 0
        if probe is not None:
            self._closed_at = trio.current_time()
            self._set_circuit(self._circuit.pass_probe(probe))

    def note_failure(self, error: BaseException, probe: int | None = None) -> None:
        """Records that a page could not be written; `probe` is its probe number, if it was one."""
        now = trio.current_time()
        self._failures += 1
        self.detail = _FULL if isinstance(error, StorageFull) else _UNAVAILABLE
        if probe is not None:
            self._set_circuit(self._circuit.fail_probe(probe, now=now, random=self._random))
        # Lack of room trips the circuit at once: a retry of the same write cannot help.
        elif self._failures >= FAILURES_MAX or isinstance(error, StorageFull):
            if self._circuit.is_closed:
                log.warning("pages cannot be stored: fetching stops", extra={"cause": str(error)})
            self._is_recovering = True
            self._set_circuit(self._circuit.trip(now=now, random=self._random))

    def abandon_probe(self, probe: int | None) -> None:
        """Ends a probe whose write was interrupted and therefore proves nothing."""
        if probe is not None:
            now = trio.current_time()
            self._set_circuit(self._circuit.abandon_probe(probe, now=now, random=self._random))

    def hold(self, size_bytes: int) -> bool:
        """Reserves memory for a page that could not be written. Returns False if HELD_BYTES_MAX
        would be exceeded."""
        if self.held_bytes + size_bytes > limits.HELD_BYTES_MAX:
            return False
        self.held_count += 1
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Ends the hold of a page that was written or given up."""
        self.held_count -= 1
        self.held_bytes -= size_bytes
        # The last held page may end the recovery, so waiters must check again.
        self._set_circuit(self._circuit)

    async def wait_turn(self) -> int | None:
        """Waits until a held page may be written. Returns its probe number, or None if the circuit
        is closed."""
        while not self._circuit.is_closed:
            now = trio.current_time()
            probing = self._circuit.start_probe(now=now)
            if probing is not None:
                self._circuit = probing
                return probing.probe
            await self._wait_changed(self._circuit.wait_s(now))
        return None

    async def wait_recovered(self, blobs: Blobs, owner: str) -> None:
        """Waits until pages may be fetched again. While no page is held, one of the waiting pollers
        tests the storage."""
        while self.is_open:
            # Held pages are the probes, or the circuit is closed and the recovery must end. The
            # timeout covers RECOVER_S_MAX, whose end sets no event.
            if self.held_count or self._circuit.is_closed:
                await self._wait_changed(PROBES.delay_s_max)
                continue
            now = trio.current_time()
            probing = self._circuit.start_probe(now=now)
            if probing is None:
                await self._wait_changed(self._circuit.wait_s(now))
            else:
                self._circuit = probing
                await self._probe(blobs, owner, probing.probe)

    async def test(self, blobs: Blobs, owner: str, size_bytes: int) -> bool:
        """Returns whether the storage accepts a body of `size_bytes`."""
        return await self._put(blobs, owner, size_bytes) is None

    async def _probe(self, blobs: Blobs, owner: str, probe: int) -> None:
        try:
            error = await self._put(blobs, owner, PROBE_BYTES)
            if error is None:
                self.note_success(probe)
            else:
                self.note_failure(error, probe)
        finally:
            self.abandon_probe(probe)  # No effect if the probe has reported.

    async def _put(self, blobs: Blobs, owner: str, size_bytes: int) -> Exception | None:
        """Stores a body and deletes it. Returns the error if the storage refuses the body."""
        prefix = f"{PROBE_PREFIX}/{owner}"
        try:
            blobs.check_room()
            # By the same method as pages, so that the probe takes the same path through the engine.
            await blobs.add(prefix, "body", (bytes(size_bytes),))
            await blobs.delete_prefix(prefix)
        except Unavailable as error:
            return error
        except (OSError, MemoryError, RuntimeError) as error:
            if not is_resource_shortage(error):
                raise
            return error
        return None

    async def _wait_changed(self, timeout_s: float) -> None:
        # At least 10 ms: a remaining time that rounds to zero would make the callers loop without
        # waiting.
        with trio.move_on_after(max(timeout_s, 0.01)):
            await self._changed.wait()

    def _set_circuit(self, circuit: Circuit) -> None:
        self._circuit = circuit
        if self._is_recovering and circuit.is_closed and not self.held_count:
            self._is_recovering = False
            log.warning("pages can be stored again: fetching goes on")
        # Wake all waiters, then replace the event: an event cannot be cleared.
        self._changed.set()
        self._changed = trio.Event()
