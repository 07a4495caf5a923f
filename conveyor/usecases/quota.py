"""Storage quotas: counts what callers have stored and refuses requests beyond a quota
(SPEC.md 4.21).

Amounts are counted from rows; no separate counter exists that could drift. A request is admitted by
what the caller has before it. While a caller is near a limit, its requests are admitted one at a
time over all processes, so no caller exceeds a quota by more than one request.

A request that is repeated under its Idempotency-Key after a crash continues what its first attempt
was admitted for. `find_begun` finds that, and then no quota refuses the request. It is called only
if a quota is used up, so other requests do not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from conveyor.domain import limits
from conveyor.domain.errors import Conflict
from conveyor.domain.ids import CallerId, JobId, LeaseId, RunId
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE
from conveyor.domain.model import Job, JobStatus
from conveyor.domain.queries import DueExports, ExpiredInputs, JobsOf, RunsOf
from conveyor.domain.quota import Quota, QuotaExceeded, Quotas
from conveyor.ports.coordinator import HostPool
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run.results import run_instant

# A caller that has used this part of a quota is near it. A smaller part serializes more requests; a
# larger one lets concurrent requests exceed the quota.
NEAR = 0.8
# Assumes that this many processes have as many running requests of the caller as this one. With
# more processes a quota may be exceeded by more than one request.
PROCESSES = 10
# A caller with at most this many jobs is counted for every request. A caller with more is counted
# every COUNT_S, unless it is near a limit.
JOBS_COUNTED_ALWAYS = 100
COUNT_S = 10.0
# An unchanged job is counted again after this time, because one of its runs may have been deleted.
JOB_S = 300.0
# How long a request waits for its turn before 409 with Retry-After, and how often it tries.
TURN_S, TURN_LOOK_S = 5.0, 0.1
# How long a killed process keeps the turn of a caller. A request that takes longer than this may
# have another one admitted beside it.
TURN_LEASE_S = 70.0
# An export or a file input is one row, written soon after. Shorter than TURN_S, so that after a
# crash the next request gets the turn before it stops waiting.
SHORT_TURN_LEASE_S = 4.0
# `Retry-After` of a refusal: room appears only when something expires or is deleted.
RETRY_S = 30.0
_PAGE = 200
# Bounds the rows that one count reads, and the callers that are remembered.
_SLOTS_MAX = 5_000
_MIB = 1 << 20
# The fewest bytes of a request that can hold one line. It bounds the tasks that a request can
# bring.
_BYTES_PER_LINE_MIN = 3

# Reads what an earlier attempt of the same request has created, if anything.
FindBegun = Callable[[], Awaitable[object | None]]


@dataclass(frozen=True, slots=True)
class Use:
    """The amounts of one caller."""

    jobs: int = 0
    live_runs: int = 0
    open_jobs: int = 0
    tasks: int = 0
    bytes: int = 0

    def of(self, quota: Quota) -> int:
        return {
            Quota.LIVE_RUNS: self.live_runs,
            Quota.OPEN_JOBS: self.open_jobs,
            Quota.STORED_TASKS: self.tasks,
            Quota.STORED_BYTES: self.bytes,
        }[quota]


@dataclass(frozen=True, slots=True)
class _CountedJob:
    job: Job
    at: float
    tasks: int
    bytes: int


@dataclass(slots=True, eq=False)
class _Account:
    """What this process knows about one caller."""

    use: Use = Use()
    counted_at: float = -math.inf
    jobs: dict[JobId, _CountedJob] = field(default_factory=dict)
    pending_count: int = 0
    pending_tasks: int = 0
    turn: trio.Lock = field(default_factory=trio.Lock)


class StorageQuotas:
    """The quotas on what callers store."""

    def __init__(self, env: Context, quotas: Quotas) -> None:
        self._env = env
        self._quotas = quotas
        self._accounts: dict[CallerId, _Account] = {}

    async def count(self, caller: CallerId) -> Use:
        """Counts what the caller has now."""
        return await self._count(caller, self._account(caller), live_s=0.0)

    @asynccontextmanager
    async def admit(
        self,
        caller: CallerId,
        quotas: Sequence[Quota],
        find_begun: FindBegun,
        *,
        bytes_sent: int | None = None,
    ) -> AsyncGenerator[None, None]:
        """Encloses a request that may store something. Raises QuotaExceeded if the caller has too
        much.

        `bytes_sent` bounds what the request can bring; it is None if the request names existing
        rows.
        """
        limited = [quota for quota in quotas if self._quotas.get(quota) is not None]
        if not limited:
            yield
            return
        account = self._account(caller)
        brings = limits.TASKS_MAX if bytes_sent is None else bytes_sent // _BYTES_PER_LINE_MIN
        if account.counted_at < trio.current_time() - COUNT_S or (
            account.use.jobs <= JOBS_COUNTED_ALWAYS
        ):
            await self._count(caller, account, live_s=COUNT_S)
        # Before the check, so that concurrent requests of this process see each other.
        account.pending_count += 1
        account.pending_tasks += brings
        try:
            if not self._is_near(account, limited):
                yield
                return
            # The local lock first: of this process's requests only one competes for the shared
            # lease.
            async with account.turn, self._turn_elsewhere(caller, TURN_LEASE_S):
                use = await self._count(caller, account, live_s=0.0)
                exceeded = self._find_exceeded(use, limited)
                if exceeded is not None and await find_begun() is None:
                    raise exceeded
                yield
        finally:
            account.pending_count -= 1
            account.pending_tasks -= brings
            # A large request changes the amounts much: count again at the next one, whatever
            # COUNT_S.
            if brings > 10 * limits.CHUNK_TASKS:
                account.counted_at = -math.inf

    @asynccontextmanager
    async def admit_export(
        self, caller: CallerId, run_id: RunId, find_begun: FindBegun
    ) -> AsyncGenerator[None, None]:
        """Encloses a request for one more export of a run."""
        limit = self._quotas.get(Quota.EXPORTS_PER_RUN)
        async with self._account(caller).turn, self._turn_elsewhere(caller, SHORT_TURN_LEASE_S):
            is_full = limit is not None and await self._count_exports(run_id) >= limit
            if limit is not None and is_full and await find_begun() is None:
                raise QuotaExceeded(Quota.EXPORTS_PER_RUN, limit, retry_after_s=RETRY_S)
            yield

    @asynccontextmanager
    async def admit_slot(
        self, caller: CallerId, find_begun: FindBegun
    ) -> AsyncGenerator[None, None]:
        """Encloses a request for one more file input."""
        limit = self._quotas.get(Quota.UPLOAD_SLOTS)
        async with self._account(caller).turn, self._turn_elsewhere(caller, SHORT_TURN_LEASE_S):
            is_full = limit is not None and await self.count_slots(caller) >= limit
            if limit is not None and is_full and await find_begun() is None:
                raise QuotaExceeded(Quota.UPLOAD_SLOTS, limit, retry_after_s=RETRY_S)
            yield

    async def count_slots(self, caller: CallerId) -> int:
        # Later than any input can expire, so the query finds all of them.
        until = self._env.now() + limits.INPUT_TTL_S + limits.INPUT_GRACE_S
        slots = await self._env.store.find(ExpiredInputs(expired_by=until, limit=_SLOTS_MAX))
        return sum(slot.caller == caller for slot in slots)

    async def _count_exports(self, run_id: RunId) -> int:
        # Later than any export can be due, so the query finds all of them.
        until = self._env.now() + limits.EXPORT_TTL_S + limits.EXPORT_CLAIM_S
        exports = await self._env.store.find(DueExports(due_by=until, limit=_SLOTS_MAX))
        return sum(export.run_id == run_id for export in exports)

    def _account(self, caller: CallerId) -> _Account:
        if len(self._accounts) > _SLOTS_MAX:
            # An account with running requests holds their lock and must stay.
            busy = {caller: a for caller, a in self._accounts.items() if a.pending_count}
            self._accounts = busy
        return self._accounts.setdefault(caller, _Account())

    def _is_near(self, account: _Account, quotas: Sequence[Quota]) -> bool:
        """Returns whether the running requests may bring the caller to a limit."""
        pending = {
            Quota.LIVE_RUNS: account.pending_count,
            Quota.OPEN_JOBS: account.pending_count,
            Quota.STORED_TASKS: account.pending_tasks,
            Quota.STORED_BYTES: account.pending_count * _MIB,
        }
        return any(
            account.use.of(quota) + PROCESSES * pending[quota]
            >= NEAR * (self._quotas.get(quota) or 0)
            for quota in quotas
        )

    def _find_exceeded(self, use: Use, quotas: Sequence[Quota]) -> QuotaExceeded | None:
        for quota in quotas:
            limit = self._quotas.get(quota)
            if limit is not None and use.of(quota) >= limit:
                return QuotaExceeded(quota, limit, retry_after_s=RETRY_S)
        return None

    @asynccontextmanager
    async def _turn_elsewhere(self, caller: CallerId, lease_s: float) -> AsyncGenerator[None, None]:
        """Admits one request of the caller at a time, over all processes."""
        lease_id = await self._take_turn(caller, lease_s)
        try:
            yield
        finally:
            # Shielded: an unreleased lease would block the caller's next request until it ages out.
            with trio.move_on_after(TURN_S, shield=True):
                await self._env.coordinator.release((lease_id,))

    async def _take_turn(self, caller: CallerId, lease_s: float) -> LeaseId:
        # A host pool with a cap of 1 is a lock over all processes. No job has such an id.
        pool = HostPool(JobId(f"quota-{caller}"), "admission", cap=1)
        with trio.move_on_after(TURN_S):
            while True:
                (lease_id,) = await self._env.coordinator.acquire_hosts((pool,), ttl_s=lease_s)
                if lease_id is not None:
                    return lease_id
                await trio.sleep(TURN_LOOK_S)
        raise Conflict("Another request of yours is being judged; ask again.", retry_after_s=1)

    async def _count(self, caller: CallerId, account: _Account, *, live_s: float) -> Use:
        """Counts from the rows. Unchanged jobs are not read again; a job with a live run is reused
        for up to `live_s`."""
        now, before = trio.current_time(), None
        jobs: dict[JobId, _CountedJob] = {}
        while True:
            query = JobsOf(caller=caller, statuses=JOB_VISIBLE, before=before, limit=_PAGE)
            page = await self._env.store.find(query)
            for job in page:
                known = account.jobs.get(job.job_id)
                fresh_s = live_s if job.active_run_id else JOB_S
                if known is None or known.job != job or known.at + fresh_s <= now:
                    known = await self._count_job(job)
                jobs[job.job_id] = known
            if len(page) < _PAGE:
                break
            before = page[-1].job_id
        account.jobs, account.counted_at = jobs, now
        account.use = Use(
            jobs=len(jobs),
            live_runs=sum(use.job.active_run_id is not None for use in jobs.values()),
            open_jobs=sum(use.job.status is JobStatus.OPEN for use in jobs.values()),
            tasks=sum(use.tasks for use in jobs.values()),
            bytes=sum(use.bytes for use in jobs.values()),
        )
        return account.use

    async def _count_job(self, job: Job) -> _CountedJob:
        env, now = self._env, trio.current_time()
        query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, limit=_PAGE)
        tasks = size_bytes = 0
        for run in await env.store.find(query):
            # The planned number, because the rows of a list that is still being ingested will exist
            # soon.
            tasks += run.planned
            instant = run_instant(env, run)
            # Expired bodies do not count, whether they are removed yet or not.
            if instant is None or instant > env.now():
                size_bytes += (await totals_of(env, run)).stored_bytes
        return _CountedJob(job, now, tasks, size_bytes)
