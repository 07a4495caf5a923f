"""FallbackCoordinator: goes on with a smaller cap of its own while the shared one is away
(docs/engines.md, Fallback coordinator).

Neither without a limit nor standing still: each process keeps to its share of every cap, by the
number of workers last seen. What is held meanwhile is told to the other side when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.domain.randomness import Random
from conveyor.engines.redis import keys
from conveyor.ports.coordinator import Coordinator, HostPool
from conveyor.ports.errors import Unavailable

log = logging.getLogger(__name__)

MEND_S = 0.5


class RemoteCoordinator(Coordinator, Protocol):
    async def restore(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> None: ...


class FallbackCoordinator:
    """`workers_on` is the subject on which workers leave the mark of their presence."""

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
        token = keys.token(self._random)
        taken = [keys.lease(job_id, run_id, f"{token}.{number}") for number in range(count)]
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
        now, spacing_s = trio.current_time(), pool.spacing_s * self._workers_count
        if now < self._next_at.get(pool.name, now) or self._free_permits(pool.name, pool.cap) < 1:
            return None
        self._next_at[pool.name] = now + spacing_s
        lease_id = keys.host_lease(pool, keys.token(self._random))
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
        kept = [lease_id for lease_id in lease_ids if lease_id in self._live()]
        self._hold(kept, ttl_s)
        return frozenset(lease_ids) - frozenset(kept)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        self._release_local(lease_ids)
        if not self.is_away:
            try:
                await self._remote.release(lease_ids)
            except Unavailable as error:
                self._mark_unavailable(error)  # They age out.

    async def count(self, run_id: RunId) -> int:
        """Unavailable while the other side is away: what other processes hold is not known here,
        and a receipt that counts only our own would claim that nothing is in flight."""
        if self.is_away:
            raise Unavailable("the coordinator is unavailable")
        try:
            return await self._remote.count(run_id)
        except Unavailable as error:
            self._mark_unavailable(error)
            raise

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        """Marks are harmless to forget: while the other side is away, they are."""
        if self.is_away:
            return
        try:
            await self._remote.put_status(owner, marks, ttl_s=ttl_s)
            if self._workers_on in marks:
                await self._count_workers()
        except Unavailable as error:
            self._mark_unavailable(error)

    async def list_status(self, subject: str) -> list[str]:
        if self.is_away:
            raise Unavailable("the coordinator is unavailable")
        try:
            return await self._remote.list_status(subject)
        except Unavailable as error:
            self._mark_unavailable(error)
            raise

    async def reconnect_forever(self) -> NoReturn:
        """Looks for the other side as long as it is away."""
        while True:
            await self._away.wait()
            await trio.sleep(MEND_S)
            with suppress(Unavailable):
                await self.reconnect()

    async def reconnect(self) -> None:
        """Tells the other side what is held here, and relies on it again. It may have forgotten
        all: until every worker has left its mark anew, those known before count too."""
        self._marks_whole_at = trio.current_time() + limits.STATUS_TTL_S
        await self._count_workers()
        told: set[LeaseId] = set()
        while new := self._live() - told:
            await self._remote.restore(sorted(new), ttl_s=limits.LEASE_TTL_S)
            told |= new
        self._next_at.clear()
        self._away = trio.Event()
        log.warning("coordinator available again", extra={"leases": len(told)})

    async def _count_workers(self) -> None:
        seen = len(await self._remote.list_status(self._workers_on))
        known = self._workers_count if trio.current_time() < self._marks_whole_at else 1
        self._workers_count = max(seen, known)

    def _mark_unavailable(self, error: Unavailable) -> None:
        """Says so once, however many calls fail."""
        if not self.is_away:
            self._away.set()
            log.warning(
                "coordinator unavailable: using local limits (cap / workers)",
                extra={"cause": str(error), "workers": self._workers_count},
            )

    def _free_permits(self, pool: str, cap: int) -> int:
        share = -(-cap // self._workers_count)
        return share - sum(keys.pool_name(lease_id) == pool for lease_id in self._live())

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
