"""FallbackCoordinator: continues with a smaller cap of its own while Redis is unavailable
(docs/engines.md, Fallback coordinator).

Without Redis the workers could stop, or ignore the caps. Neither is acceptable. Instead each
process keeps to its part of every cap: the cap divided by the number of workers last seen. When
Redis is back, the process restores the leases that it holds there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, Random, RunId
from conveyor.engines.redis.connection import host_lease_name, lease_name, new_token, pool_name
from conveyor.ports.coordinator import Coordinator, HostPool
from conveyor.ports.errors import Unavailable

log = logging.getLogger(__name__)

# The pause between two attempts to reconnect. A longer one keeps the smaller caps for longer.
MEND_S = 0.5


class RemoteCoordinator(Coordinator, Protocol):
    async def restore(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> None: ...


class FallbackCoordinator:
    """`workers_on` is the subject of the status reports by which workers are counted."""

    def __init__(self, remote: RemoteCoordinator, random: Random, *, workers_on: str) -> None:
        self._remote = remote
        self._random = random
        self._workers_on = workers_on
        self._workers_count = 1
        self._marks_whole_at = 0.0
        self._away = trio.Event()
        self._held: dict[LeaseId, float] = {}
        self._next_at: dict[str, float] = {}

    @property
    def is_away(self) -> bool:
        return self._away.is_set()

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        if not self.is_away:
            try:
                taken = await self._remote.acquire(
                    job_id, run_id, count_max=count_max, cap=cap, ttl_s=ttl_s
                )
            except Unavailable as error:
                self._mark_unavailable(error)
            else:
                self._hold(taken, ttl_s)
                return taken
        count = max(0, min(count_max, self._free_permits(job_id, cap)))
        token = new_token(self._random)
        taken = [lease_name(job_id, run_id, f"{token}.{number}") for number in range(count)]
        self._hold(taken, ttl_s)
        return taken

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        if not self.is_away:
            try:
                passed = await self._remote.acquire_hosts(pools, ttl_s=ttl_s)
            except Unavailable as error:
                self._mark_unavailable(error)
            else:
                self._hold([lease_id for lease_id in passed if lease_id is not None], ttl_s)
                return passed
        return [self._enter(pool, ttl_s) for pool in pools]

    def _enter(self, pool: HostPool, ttl_s: float) -> LeaseId | None:
        # Each worker keeps a spacing that is longer by the number of workers, so that all of them
        # together keep the spacing of the pool.
        now, spacing_s = trio.current_time(), pool.spacing_s * self._workers_count
        next_at = self._next_at.get(pool.name, now)
        # A later instant was set by a longer spacing. The current one applies at once.
        is_early = now < next_at <= now + spacing_s
        if is_early or self._free_permits(pool.name, pool.cap) < 1:
            return None
        self._next_at[pool.name] = now + spacing_s
        lease_id = host_lease_name(pool, new_token(self._random))
        self._hold([lease_id], ttl_s)
        return lease_id

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        if not self.is_away:
            try:
                lost = await self._remote.renew(lease_ids, ttl_s=ttl_s)
            except Unavailable as error:
                self._mark_unavailable(error)
            else:
                self._hold([lease_id for lease_id in lease_ids if lease_id not in lost], ttl_s)
                self._release_local(lost)
                return lost
        # Leases that are still live here count as renewed, because their work is running. A lease
        # that has ended stays lost.
        live_ids = [lease_id for lease_id in lease_ids if lease_id in self._live()]
        self._hold(live_ids, ttl_s)
        return frozenset(lease_ids) - frozenset(live_ids)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        # Locally first: a later reconnect must not restore a released lease.
        self._release_local(lease_ids)
        if not self.is_away:
            try:
                await self._remote.release(lease_ids)
            except Unavailable as error:
                # Leases that were not released in Redis end there by themselves.
                self._mark_unavailable(error)

    async def count(self, run_id: RunId) -> int:
        """Raises Unavailable while Redis is unavailable.

        This process does not know the leases of others. A count of its own leases alone could
        report that nothing is in flight although something is.
        """
        if self.is_away:
            raise Unavailable("the coordinator is unavailable")
        try:
            return await self._remote.count(run_id)
        except Unavailable as error:
            self._mark_unavailable(error)
            raise

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        """Publishes status reports, or drops them while Redis is unavailable. They are only
        informational."""
        if self.is_away:
            return
        try:
            await self._remote.put_status(owner, marks, ttl_s=ttl_s)
        except Unavailable as error:
            self._mark_unavailable(error)

    async def list_status(self, subject: str) -> list[str]:
        if self.is_away:
            raise Unavailable("the coordinator is unavailable")
        try:
            texts = await self._remote.list_status(subject)
        except Unavailable as error:
            self._mark_unavailable(error)
            raise
        if subject == self._workers_on:
            self._note_workers(len(texts))
        return texts

    async def reconnect_forever(self) -> NoReturn:
        """Tries to reconnect while Redis is unavailable."""
        while True:
            await self._away.wait()
            await trio.sleep(MEND_S)
            with suppress(Unavailable):
                await self.reconnect()

    async def reconnect(self) -> None:
        """Restores the held leases in Redis, and uses Redis again.

        Redis may have lost its data, and with it the status reports of workers. So for
        `STATUS_TTL_S` the number of workers seen before counts as well.
        """
        self._marks_whole_at = trio.current_time() + limits.STATUS_TTL_S
        await self._count_workers()
        # Repeated, because other tasks may acquire local leases while `restore` waits. The switch
        # back follows without a checkpoint, so no lease is missed.
        restored: set[LeaseId] = set()
        while new := self._live() - restored:
            await self._remote.restore(sorted(new), ttl_s=limits.LEASE_TTL_S)
            restored |= new
        self._next_at.clear()
        self._away = trio.Event()
        log.warning("coordinator available again", extra={"leases": len(restored)})

    async def _count_workers(self) -> None:
        self._note_workers(len(await self._remote.list_status(self._workers_on)))

    def _note_workers(self, seen: int) -> None:
        # Too small a number would give each worker too large a part of the caps, so the larger of
        # both counts.
        known = self._workers_count if trio.current_time() < self._marks_whole_at else 1
        self._workers_count = max(seen, known)

    def _mark_unavailable(self, error: Unavailable) -> None:
        """Switches to local caps. Logs only the first failed call."""
        if not self.is_away:
            self._away.set()
            log.warning(
                "coordinator unavailable: using local limits (cap / workers)",
                extra={"cause": str(error), "workers": self._workers_count},
            )

    def _free_permits(self, pool: str, cap: int) -> int:
        # Rounded up: with more workers than the cap each still gets one, so that none stops.
        share = -(-cap // self._workers_count)
        return share - sum(pool_name(lease_id) == pool for lease_id in self._live())

    def _hold(self, lease_ids: Sequence[LeaseId], ttl_s: float) -> None:
        until = trio.current_time() + ttl_s
        self._held.update((lease_id, until) for lease_id in lease_ids)

    def _release_local(self, lease_ids: Iterable[LeaseId]) -> None:
        for lease_id in lease_ids:
            self._held.pop(lease_id, None)

    def _live(self) -> set[LeaseId]:
        now = trio.current_time()
        self._held = {lease_id: until for lease_id, until in self._held.items() if until > now}
        return set(self._held)
