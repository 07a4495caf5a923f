"""MemoryCoordinator: leases and status reports in dicts, each with its end (SPEC.md 4.6).

`marks` are status reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import HostPool


class _Lease(msgspec.Struct):
    job_id: JobId
    run_id: RunId
    expires_at: float


class MemoryCoordinator:
    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock = clock
        self._random = random
        self._leases: dict[LeaseId, _Lease] = {}
        self._marks: dict[tuple[str, str], tuple[str, float]] = {}
        self._next_at: dict[str, float] = {}

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        await trio.lowlevel.checkpoint()
        return self._take(job_id, run_id, count_max=count_max, cap=cap, ttl_s=ttl_s)

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        await trio.lowlevel.checkpoint()
        return [self._enter(pool, ttl_s) for pool in pools]

    def _enter(self, pool: HostPool, ttl_s: float) -> LeaseId | None:
        now = self._clock.steady()
        next_at = self._next_at.get(pool.name, 0.0)
        if next_at > now + pool.spacing_s + limits.HOST_SLACK_S:
            next_at = now  # A longer spacing set it. The current one applies at once.
        if pool.spacing_s and now < next_at - limits.HOST_SLACK_S:
            return None
        # A lease of a host pool belongs to the pool and to no run. It is taken before the spacing
        # is used: a request that finds the pool full uses up nothing.
        taken = self._take(JobId(pool.name), RunId(""), count_max=1, cap=pool.cap, ttl_s=ttl_s)
        if not taken:
            return None
        if pool.spacing_s:
            self._next_at[pool.name] = max(next_at, now) + pool.spacing_s
        return taken[0]

    def _take(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        live_count = sum(lease.job_id == job_id for lease in self._live().values())
        count = max(0, min(count_max, cap - live_count))
        expires_at = self._clock.steady() + ttl_s
        lease_ids = [LeaseId(f"{self._random.getrandbits(128):032x}") for _ in range(count)]
        for lease_id in lease_ids:
            self._leases[lease_id] = _Lease(job_id, run_id, expires_at)
        return lease_ids

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        await trio.lowlevel.checkpoint()
        live = self._live()
        for lease_id in lease_ids:
            if lease_id in live:
                live[lease_id].expires_at = self._clock.steady() + ttl_s
        return frozenset(lease_ids) - live.keys()

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await trio.lowlevel.checkpoint()
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)

    async def count(self, run_id: RunId) -> int:
        await trio.lowlevel.checkpoint()
        return sum(lease.run_id == run_id for lease in self._live().values())

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        await trio.lowlevel.checkpoint()
        expires_at = self._clock.steady() + ttl_s
        for subject, text in marks.items():
            self._marks[subject, owner] = (text, expires_at)

    async def list_status(self, subject: str) -> list[str]:
        await trio.lowlevel.checkpoint()
        now = self._clock.steady()
        self._marks = {at: mark for at, mark in self._marks.items() if now < mark[1]}
        return [text for (on, _), (text, _) in sorted(self._marks.items()) if on == subject]

    def leases(self) -> list[tuple[str, str, float]]:
        """Returns the job, the run and the end of every live lease, for checkers."""
        return [(lease.job_id, lease.run_id, lease.expires_at) for lease in self._live().values()]

    def marks(self) -> list[tuple[str, str]]:
        """Returns every live status report with its subject, for checkers."""
        now = self._clock.steady()
        return [(on, text) for (on, _), (text, until) in self._marks.items() if now < until]

    def forget(self) -> None:
        """Removes every lease, like a failover of Redis may."""
        self._leases.clear()

    def _live(self) -> dict[LeaseId, _Lease]:
        """Removes ended leases, and returns the live ones."""
        now = self._clock.steady()
        self._leases = {
            lease_id: lease for lease_id, lease in self._leases.items() if now < lease.expires_at
        }
        return self._leases
