"""RedisCoordinator: leases, host pools and status reports on a Redis server (SPEC.md 4.6).

Each operation is one Lua script, so it is atomic, and it uses the server's clock, so the workers'
clocks do not matter. In keys and names, `marks` are status reports. A pool is a sorted set of
leases with their ends as scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, Random, RunId
from conveyor.engines.redis.connection import (
    DEADLINE_S,
    Keys,
    RedisConnection,
    Script,
    host_lease_name,
    is_lease_name,
    lease_name,
    member_name,
    new_token,
    pool_name,
    translating,
)
from conveyor.ports.coordinator import HostPool

_ACQUIRE, _ENTER = Script("acquire"), Script("acquire_hosts")
_RENEW, _RESTORE, _COUNT = Script("renew"), Script("restore"), Script("count")
_MARK, _MARKS = Script("status_put"), Script("status_list")

# How long the server keeps the job of a run, and how often a worker writes it again.
_INTRODUCED_S = 24 * 3600.0
_INTRODUCE_AGAIN_S = 3600.0
_INTRODUCED_MAX = 10_000  # Bounds the memory. A forgotten run costs one more write.
# Concurrent writes of status reports: all of them share one deadline.
_MARKS_AT_ONCE = 32

_Args = list[str | int]
# The pools of one job, with some of their leases.
_Pools = dict[str, list[LeaseId]]


class RedisCoordinator:
    def __init__(
        self, link: RedisConnection, random: Random, *, space: str, deadline_s: float = DEADLINE_S
    ) -> None:
        self._link = link
        self._random = random
        self._keys = Keys(space)
        self._introduced: dict[RunId, float] = {}
        self._deadline_s = deadline_s

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        # One random token per call; the script appends a number for each lease.
        stem = lease_name(job_id, run_id, new_token(self._random))
        with translating(self._deadline_s):
            is_known = self._is_introduced(run_id)
            if not is_known:
                await self._introduce(job_id, run_id)
            args: _Args = [_us(ttl_s), cap, count_max, member_name(stem)]
            count, live = await self._link.run(_ACQUIRE, [self._keys.pool(job_id)], args)
            if is_known and not live:
                # The pool was empty. The server may have lost its data, and the job of the run with
                # it, so write that again.
                await self._introduce(job_id, run_id)
        return [LeaseId(f"{stem}.{number}") for number in range(1, count + 1)]

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        by_job: dict[JobId, list[int]] = defaultdict(list)
        for index, pool in enumerate(pools):
            by_job[pool.job_id].append(index)
        answers: list[LeaseId | None] = [None] * len(pools)
        with translating(self._deadline_s):
            for indexes in by_job.values():
                passed = await self._enter([pools[index] for index in indexes], ttl_s)
                for index, lease_id in zip(indexes, passed, strict=True):
                    answers[index] = lease_id
        return answers

    async def _enter(self, pools: Sequence[HostPool], ttl_s: float) -> list[LeaseId | None]:
        """Acquires leases of host pools of one job."""
        numbers: dict[str, int] = {}
        keys: list[str] = []
        args: _Args = [_us(ttl_s), _us(limits.HOST_SLACK_S)]
        lease_ids = [host_lease_name(pool, new_token(self._random)) for pool in pools]
        for pool, lease_id in zip(pools, lease_ids, strict=True):
            if pool.name not in numbers:
                numbers[pool.name] = len(numbers) + 1
                keys += [self._keys.pool(pool.name), self._keys.next_at(pool)]
            number, spacing = numbers[pool.name], _us(pool.spacing_s)
            args += [number, pool.cap, spacing, member_name(lease_id)]
        passed = await self._link.run(_ENTER, keys, args)
        return [
            lease_id if is_through else None
            for lease_id, is_through in zip(lease_ids, passed, strict=True)
        ]

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        lost = {lease_id for lease_id in lease_ids if not is_lease_name(lease_id)}
        with translating(self._deadline_s):
            for pools in self._by_job(lease_ids):
                named = [lease_id for members in pools.values() for lease_id in members]
                positions = await self._link.run(_RENEW, list(pools), _script_args(pools, ttl_s))
                lost |= {named[position - 1] for position in positions}
        return frozenset(lost)

    async def restore(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> None:
        """Makes leases live again, even above the cap.

        Their work continued while Redis was unavailable, so the leases are in use.
        """
        with translating(self._deadline_s):
            for pools in self._by_job(lease_ids):
                await self._link.run(_RESTORE, list(pools), _script_args(pools, ttl_s))

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        with translating(self._deadline_s):
            for pools in self._by_job(lease_ids):
                for key, members in pools.items():
                    await self._link.drop(key, [member_name(member) for member in members])

    async def count(self, run_id: RunId) -> int:
        with translating(self._deadline_s):
            job_id = await self._link.get(self._keys.job_of(run_id))
            if job_id is None:
                return 0
            return int(await self._link.run(_COUNT, [self._keys.pool(job_id)], [f"{run_id}/"]))

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        async def leave(subjects: Sequence[str]) -> None:
            for subject in subjects:
                args: _Args = [_us(ttl_s), owner, marks[subject]]
                await self._link.run(_MARK, [self._keys.marks(subject)], args)

        subjects = list(marks)
        with translating(self._deadline_s):
            async with trio.open_nursery() as nursery:
                for start in range(min(len(subjects), _MARKS_AT_ONCE)):
                    nursery.start_soon(leave, subjects[start::_MARKS_AT_ONCE])

    async def list_status(self, subject: str) -> list[str]:
        with translating(self._deadline_s):
            return list(await self._link.run(_MARKS, [self._keys.marks(subject)], []))

    def _is_introduced(self, run_id: RunId) -> bool:
        known_at = self._introduced.get(run_id)
        return known_at is not None and trio.current_time() - known_at < _INTRODUCE_AGAIN_S

    async def _introduce(self, job_id: JobId, run_id: RunId) -> None:
        """Stores the job of a run, because `count` knows only the run."""
        await self._link.put(self._keys.job_of(run_id), job_id, ttl_s=_INTRODUCED_S)
        if len(self._introduced) >= _INTRODUCED_MAX:
            self._introduced.clear()
        self._introduced[run_id] = trio.current_time()

    def _by_job(self, lease_ids: Sequence[LeaseId]) -> list[_Pools]:
        """Groups leases by job. A script may use only keys of one hash slot of a cluster, and the
        keys of one job share a slot."""
        by_job: dict[str, _Pools] = {}
        for lease_id in lease_ids:
            if is_lease_name(lease_id):
                pool = pool_name(lease_id)
                pools = by_job.setdefault(pool.partition("/")[0], {})
                pools.setdefault(self._keys.pool(pool), []).append(lease_id)
        return list(by_job.values())


def _script_args(pools: _Pools, ttl_s: float) -> _Args:
    args: _Args = [_us(ttl_s)]
    for members in pools.values():
        args += [len(members), *map(member_name, members)]
    return args


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
