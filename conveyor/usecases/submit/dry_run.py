"""Dry runs: what a submit or a rerun would do, and what it would cost; nothing is stored
(docs/api.md, Dry run).

The real use case runs up to its first commit, so a dry run is refused for the same reasons and in
the same order as the real request.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
import trio

from conveyor.domain import budget, limits
from conveyor.domain.budget import FREE, PriceRange
from conveyor.domain.changes import Change, Chunk, Insert, Key, R, Verdict
from conveyor.domain.errors import InvalidTask
from conveyor.domain.ids import CallerId, JobId, RunId
from conveyor.domain.model import JobType, Run
from conveyor.domain.queries import Q, Query, TaskPage, TasksOf
from conveyor.domain.schedule import Schedule
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import Refusal
from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import BlobTooLarge
from conveyor.ports.store import Store
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job, pages_of
from conveyor.usecases.run.rerun import RerunCount, RerunFilter, count_row, ended_run
from conveyor.usecases.submit.jobs import Submission


class SubmitPreview(msgspec.Struct, frozen=True, kw_only=True):
    """The number of valid lines, and the invalid lines counted by reason."""

    valid: int
    reasons: dict[str, int]
    invalid_tasks: list[InvalidTask]
    price: PriceRange

    @property
    def invalid(self) -> int:
        return sum(self.reasons.values())


class RerunPreview(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tasks that would start over, and of tasks that would be inherited."""

    rerun_of: RunId | None
    retried: int
    inherited: int
    price: PriceRange | None


async def preview_submit(env: Context, request: Submission) -> SubmitPreview:
    """Validates every line as a submit would. The caller has rehearsed the submit before."""
    reasons: Counter[str] = Counter()
    refusals: list[InvalidTask] = []
    price = FREE
    for index, draft in enumerate(request.drafts):
        # A long list must not block heartbeats and other requests of this process.
        if index % limits.CHUNK_TASKS == limits.CHUNK_TASKS - 1:
            await trio.lowlevel.checkpoint()
        try:
            spec, _ = admission.check_task(
                index, draft, request.params.values, env.config.targets, env.config.gateway
            )
        except Refusal as refusal:
            invalid = admission.invalid_task(index, refusal)
            reasons[invalid.reason] += 1
            if len(refusals) < limits.INVALID_TASKS_SHOWN_MAX:
                refusals.append(invalid)
        else:
            price += _price(env, {**request.params.values, **(spec.params or {})})
    valid = len(request.drafts) - reasons.total()
    return SubmitPreview(
        valid=valid,
        reasons=dict(reasons),
        invalid_tasks=refusals,
        price=price,
    )


async def preview_rerun(
    env: Context, caller: CallerId, job_id: str, choice: RerunFilter, run: Run
) -> RerunPreview:
    """Reads every row of the latest run, which `run` would repeat. The price is None if the lists
    of that run were not completely ingested, and for the list of a scheduled job."""
    job = await load_owned_job(env, caller, job_id)
    if job.type is JobType.SCHEDULED and choice.is_everything:
        return RerunPreview(rerun_of=run.rerun_of, retried=run.planned, inherited=0, price=None)
    previous = await ended_run(env, job, choice)
    if previous.open_batches:
        return RerunPreview(rerun_of=previous.run_id, retried=run.planned, inherited=0, price=None)
    source, chosen, price = choice.of(previous), RerunCount(), FREE
    async with aclosing(pages_of(env, previous)) as pages:
        async for page in pages:
            for row in page:
                if count_row(chosen, row, source):
                    price += _price(env, {**job.params, **(row.params or {})})
    return RerunPreview(
        rerun_of=previous.run_id,
        retried=chosen.restarted,
        inherited=previous.total - chosen.restarted,
        price=price,
    )


def _price(env: Context, params: Mapping[str, str]) -> PriceRange:
    """Direct fetches cost no credits."""
    return budget.price_of(params) if env.config.targets is None else FREE


# Rehearsal: runs a use case up to its first commit, which does not happen (docs/api.md, Dry run).


class WouldCommit(Exception):
    """Carries the changes that would have been committed. It is not a ConveyorError, so that no use
    case catches it."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__("a rehearsal ends here")
        self.changes = changes


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What the request would create: a run, or a schedule for later runs."""

    run: Run | None = None
    schedule: Schedule | None = None

    @property
    def planned(self) -> int:
        if self.run is not None:
            return self.run.planned
        return 0 if self.schedule is None else self.schedule.total


async def rehearse(env: Context, work: Callable[[Context], Awaitable[object]]) -> Rehearsed:
    """Runs `work` without effects and returns what it would create. Refusals are raised as they
    are."""
    try:
        await work(replace(env, store=_ReadOnlyStore(env), blobs=_PretendedBlobs(env.blobs)))
    except WouldCommit as reached:
        inserts = [
            write
            for change in reached.changes
            for write in change.writes
            if isinstance(write, Insert)
        ]
        runs = [write.row for write in inserts if isinstance(write.row, Run)]
        schedules = [write.row for write in inserts if isinstance(write.row, Schedule)]
        return Rehearsed(next(iter(runs), None), next(iter(schedules), None))
    return Rehearsed()


class _ReadOnlyStore:
    def __init__(self, env: Context) -> None:
        self._inner: Store = env.store
        self._blobs = env.blobs

    async def read(self, key: Key[R]) -> R | None:
        return await self._inner.read(key)

    async def find(self, query: Query[Q]) -> list[Q]:
        return await self._inner.find(query)

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        return await self._inner.page_tasks(query, read_max=read_max)

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        self._blobs.check_room()  # Full storage refuses new work.
        # The first commit of a submit or a rerun creates the run or the schedule, so nothing later
        # is needed.
        raise WouldCommit(changes)

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        raise WouldCommit(())

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        raise WouldCommit(())

    async def delete_expired(self, now: float) -> int:
        raise WouldCommit(())


class _PretendedBlobs:
    """Stores nothing. A copy is read from its original."""

    def __init__(self, inner: Blobs) -> None:
        self._inner = inner
        self._originals: dict[str, str] = {}
        self.check_room = inner.check_room
        self.upload_url = inner.upload_url
        self.download_url = inner.download_url

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        self.check_room()
        body = b"".join(parts)
        return Stored(key, len(body), hashlib.sha256(body).hexdigest())

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        return await self.put(f"{prefix}/{name}", parts)

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        self.check_room()
        digest, size_bytes = hashlib.sha256(), 0
        async for piece in pieces:
            digest.update(piece)
            size_bytes += len(piece)
        return Stored(key, size_bytes, digest.hexdigest())

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        # The use case reads its copy, which does not exist in a dry run.
        self._originals[to] = key
        async with aclosing(self.open(key)) as pieces:
            return await self.put_stream(to, _limit_bytes(pieces, to, bytes_max))

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        original = self._originals.get(key, key)
        async with aclosing(self._inner.open(original, start=start)) as pieces:
            async for piece in pieces:
                yield piece

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        return 0


async def _limit_bytes(
    pieces: AsyncIterable[bytes], key: str, bytes_max: int | None
) -> AsyncGenerator[bytes, None]:
    seen_bytes = 0
    async for piece in pieces:
        seen_bytes += len(piece)
        if bytes_max is not None and seen_bytes > bytes_max:
            raise BlobTooLarge(key)
        yield piece
