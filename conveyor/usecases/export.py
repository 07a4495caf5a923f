"""Exports: requested, made in one walk over a run's rows, published whole, removed (SPEC.md 4.19).

At any time, memory holds one page of rows, one group of bodies, and the encoded form of that group.
An export in list order also holds the ids of all tasks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from enum import Enum
from functools import partial

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.changes import Applied, Change, ExportKey, JobKey, RunKey
from conveyor.domain.errors import (
    Conflict,
    ConveyorError,
    InvalidArgument,
    NotFound,
    ResultDamaged,
)
from conveyor.domain.export import progress
from conveyor.domain.export.entry import DamagedBody, Entry
from conveyor.domain.export.formats import ENCODERS, missing_package
from conveyor.domain.export.list_order import ListOrder
from conveyor.domain.export_record import (
    Destination,
    Export,
    ExportFormat,
    ExportOrder,
    ExportStatus,
    Manifest,
    ManifestDigest,
)
from conveyor.domain.ids import CallerId, ExportId, is_ulid, shard_of
from conveyor.domain.lifecycle import EXPORT_UNDONE, RUN_LIVE, TASK_TERMINAL
from conveyor.domain.model import Format, Run, Task, TaskRef
from conveyor.domain.queries import DueExports, TasksAt
from conveyor.domain.webhook import next_delivery_s
from conveyor.ports.errors import BlobMissing, StorageDamaged, StorageFull, Unavailable
from conveyor.ports.export_sink import ExportSink, OutgoingFile
from conveyor.ports.secret_box import CannotUnseal
from conveyor.ports.webhook_sender import Delivered, NotDelivered
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job, load_owned_run, pages_of, visible_run
from conveyor.usecases.run import results
from conveyor.usecases.run.results import (
    LetsIn,
    ResultExpiry,
    expiries_of,
    let_all_in,
    refuse_expired_run,
)

# Rows per page. A larger page needs fewer reads and more memory.
_PAGE = 500
# Bodies that are read concurrently and encoded together, by number and by bytes. Larger groups are
# faster and need more memory; one body larger than the limit is a group by itself.
_GROUP_TASKS = 64
_GROUP_BYTES = 4 * 1024 * 1024
# How often the claim is renewed, well within EXPORT_CLAIM_S. It is also how soon an exporter that
# was overtaken stops.
_BEAT_S = 2.0


class OwnershipLost(ConveyorError):
    """Another exporter has acquired the export, or the export was deleted."""


class ExportWriter:
    """Makes one file. `manifest` is complete once all pieces have been taken."""

    def __init__(
        self, env: Context, export: Export, run: Run, body_format: Format, expiries: ResultExpiry
    ) -> None:
        self._env = env
        self._export = export
        self._run = run
        self._format = body_format
        self._expiries = expiries
        self._encoder = ENCODERS[export.format](export)
        self._tally = ManifestDigest()
        self._list_order: ListOrder | None = None
        self._beat_at_s = env.clock.steady()

    def manifest(self) -> Manifest:
        return Manifest(
            export_id=self._export.export_id,
            job_id=self._export.job_id,
            run_id=self._export.run_id,
            format=self._export.format,
            created_at=self._export.created_at,
            tasks=self._export.total,
            entries=self._tally.entries,
            counts=self._tally.counts,
            body_bytes=self._tally.body_bytes,
            entries_sha256=self._tally.sha256,
            order=self._export.order,
        )

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        encoder = self._encoder
        # In the executor: the first Parquet file of a process loads a library.
        yield await self._env.executor.run(encoder.begin)
        async with aclosing(self._encode()) as pieces:
            async for piece in pieces:
                yield piece
        # A second pass over the rows: a format with a listing has it after all bodies.
        if encoder.has_listing:
            async with aclosing(self._pages()) as pages:
                async for page in pages:
                    yield await self._env.executor.run(partial(encoder.list, page))
        yield await self._env.executor.run(partial(encoder.end, self.manifest()))

    async def _encode(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                for group in _groups(page):
                    filled = await self._with_bodies(group)
                    # In the executor: compression would block the heartbeats of this process.
                    yield await self._env.executor.run(partial(self._encoder.encode, filled))
                    self._count(filled)
                    await self._beat()

    def _count(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._tally.take(entry.task.task_id, entry.status, entry.size_bytes, entry.sha256)

    async def _pages(self) -> AsyncGenerator[list[Entry], None]:
        is_by_id = self._export.order is ExportOrder.ID
        walk = self._pages_by_id() if is_by_id else self._pages_in_list_order()
        async with aclosing(walk) as pages:
            async for page in pages:
                await self._beat()
                yield [self._entry(task) for task in page]

    def _pages_by_id(self) -> AsyncGenerator[list[Task], None]:
        return pages_of(self._env, self._run, statuses=TASK_TERMINAL, limit=_PAGE)

    async def _pages_in_list_order(self) -> AsyncGenerator[list[Task], None]:
        run = self._run
        if self._list_order is None:
            self._list_order = await self._read_list_order()
        for page in self._list_order.pages(_PAGE):
            refs = [
                TaskRef(run.job_id, run.run_id, task_id, shard_of(task_id, run.shard_count))
                for task_id in page
            ]
            rows = await self._env.store.find(TasksAt(refs=tuple(refs)))
            row_of = {row.task_id: row for row in rows}
            yield [row_of[task_id] for task_id in page if task_id in row_of]

    async def _read_list_order(self) -> ListOrder:
        order = ListOrder()
        async with aclosing(self._pages_by_id()) as pages:
            async for page in pages:
                await self._beat()
                for task in page:
                    order.add(task)
        return order

    def _entry(self, task: Task) -> Entry:
        return Entry(task, self._format, self._expiries.is_over(task))

    async def _with_bodies(self, entries: Sequence[Entry]) -> list[Entry]:
        filled = list(entries)
        # Collected instead of raised, because a nursery would wrap them in an exception group.
        failures: list[ConveyorError] = []

        async def fill(at: int, entry: Entry) -> None:
            try:
                body = await _body(self._env, entry.task)
            except (Unavailable, DamagedBody) as error:
                failures.append(error)
            else:
                filled[at] = msgspec.structs.replace(entry, body=body)

        async with trio.open_nursery() as nursery:
            for at, entry in enumerate(entries):
                if entry.has_body and self._encoder.needs_bodies:
                    nursery.start_soon(fill, at, entry)
        # A damaged body decides: it fails the export, whereas an outage only defers it.
        for failure in failures:
            if isinstance(failure, DamagedBody):
                raise failure
        if failures:
            raise failures[0]
        return filled

    async def _beat(self) -> None:
        """Renews the claim with the progress. Raises OwnershipLost if another exporter has acquired
        the export."""
        now_s = self._env.clock.steady()
        if now_s < self._beat_at_s + _BEAT_S:
            return
        self._beat_at_s = now_s
        change = progress.beat(self._export, done=self._tally.entries, now=self._env.now())
        if not isinstance(await self._env.commit(change), Applied):
            raise OwnershipLost(self._export.export_id)


def _groups(page: Sequence[Entry]) -> list[list[Entry]]:
    """Splits a page into groups of neighbours whose bodies fit into memory together."""
    groups: list[list[Entry]] = [[]]
    size_bytes = 0
    for entry in page:
        is_full = size_bytes + entry.size_bytes > _GROUP_BYTES or len(groups[-1]) == _GROUP_TASKS
        if groups[-1] and is_full:
            groups.append([])
            size_bytes = 0
        groups[-1].append(entry)
        size_bytes += entry.size_bytes
    return groups


async def _body(env: Context, task: Task) -> bytes:
    """Reads a body. Raises DamagedBody with the task's id if the body is missing or cannot be
    read."""
    assert task.result is not None
    try:
        async with aclosing(env.blobs.open(task.result.key)) as pieces:
            return b"".join([piece async for piece in pieces])
    except BlobMissing:
        raise DamagedBody(f"the stored body of task {task.task_id} is missing") from None
    except StorageDamaged:
        raise DamagedBody(f"the stored body of task {task.task_id} cannot be read") from None


# Requests and processing.
#
# A run that has ended does not change, so any exporter can start the walk again at any time. A
# partial file is never visible, and the epoch in the row decides which exporter may publish.


_ABSENT = "There is no such export."
# How long a cancelled exporter may take to release its export. After that, the claim lapses after
# EXPORT_CLAIM_S and the export has one attempt less.
_LET_GO_S = 2.0


class Exported(Enum):
    """How the processing of an export ended."""

    COMPLETED = "the file is published"
    DEFERRED = "it is tried again later"
    FAILED = "it failed finally"
    FENCED = "another exporter has it, or it was deleted"
    REMOVED = "it had expired"


class ExportOptions(msgspec.Struct, frozen=True):
    """What a caller may ask for beside the format."""

    order: ExportOrder = ExportOrder.ID
    destination: Destination | None = None


_PLAIN = ExportOptions()


async def start(
    env: Context,
    caller: CallerId,
    job_id: str,
    run_id: str,
    kind: ExportFormat,
    options: ExportOptions = _PLAIN,
    *,
    export_id: str,
) -> Export:
    """Requests an export of an ended run, or finds the export that was requested under this id."""
    missing = missing_package(kind)
    if missing is not None:
        raise InvalidArgument(
            f"This server cannot write {kind} files: its operator has not installed {missing}.",
            pointer="/format",
        )
    job = await load_owned_job(env, caller, job_id)
    run = await load_owned_run(env, job, run_id)
    if run.status in RUN_LIVE:
        raise Conflict(
            "The run has not ended; wait for it or stop it first.", code="run_not_terminal"
        )
    # The results have expired, so the file would have no bodies.
    refuse_expired_run(env, run)
    put_to, destination = None, options.destination
    if destination is not None:
        place = _sealing_context(caller, job_id, export_id)
        sealed = env.secret_box.seal(msgspec.json.encode(destination), place=place)
        put_to = (shown_destination(destination), sealed)
    export = progress.new_export(
        run, ExportId(export_id), kind, options.order, put_to, now=env.now()
    )
    if isinstance(await env.commit(progress.ask(export)), Applied):
        return export
    return await own_export(env, caller, job_id, run_id, export_id)


def shown_destination(destination: Destination) -> str:
    """Returns the destination without what may be a credential: its query and its keys."""
    return destination.url.partition("?")[0]


def _sealing_context(caller: CallerId, job_id: str, export_id: str) -> str:
    return f"{caller}|{job_id}|export:{export_id}"


async def own_export(
    env: Context, caller: CallerId, job_id: str, run_id: str, export_id: str
) -> Export:
    run = await load_owned_run(env, await load_owned_job(env, caller, job_id), run_id)
    return await _export_of(env, run, export_id)


def link_token(env: Context, export: Export) -> str:
    # A link must not outlive its file.
    until = min(env.now() + limits.EXPORT_URL_TTL_S, export.expires_at)
    return results.make_token(env, _link_subject(export), purpose="export", until=until)


async def export_by_link(
    env: Context,
    run_key: RunKey,
    export_id: str,
    token: str,
    *,
    lets_in: LetsIn = let_all_in,
) -> Export:
    """Returns the export of a signed link. The link ends with its job, its run, the export and the
    key of its caller."""
    what = f"{run_key.job_id}/{run_key.run_id}/{export_id}"
    # Before any read: a request without a valid token costs no call to the store.
    results.check_token(env, token, what, purpose="export", absent=_ABSENT)
    _, run = await visible_run(env, run_key.job_id, run_key.run_id, absent=_ABSENT)
    if not lets_in(run.caller):
        raise NotFound(_ABSENT)
    return await _export_of(env, run, export_id)


def _link_subject(export: Export) -> str:
    return f"{export.job_id}/{export.run_id}/{export.export_id}"


async def _export_of(env: Context, run: Run, export_id: str) -> Export:
    """Reads the export. An unknown and an expired one raise the same NotFound, whether the row is
    removed or not."""
    key = ExportKey(run.job_id, run.run_id, ExportId(export_id))
    export = await env.store.read(key) if is_ulid(export_id) else None
    if export is None or export.expires_at <= env.now():
        raise NotFound(_ABSENT)
    return export


async def due(env: Context, *, limit: int) -> list[Export]:
    return await env.store.find(DueExports(due_by=env.now(), limit=limit))


async def process(env: Context, export: Export) -> Exported:
    """Performs what is due: makes the file, gives the export up, or removes it."""
    if export.expires_at <= env.now() or export.status not in EXPORT_UNDONE:
        # Blobs before the row: the row is what finds the blobs again after a crash.
        await env.blobs.delete_prefix(_prefix(export))
        await env.commit(progress.remove(export))
        return Exported.REMOVED
    if export.status is ExportStatus.DELIVERING:
        return await _deliver(env, export)
    # Before it is acquired again: an export that crashes its exporter must end at some point.
    if progress.failed_too_often(export):
        return await _commit_or_defer(env, progress.give_up(export, now=env.now()), Exported.FAILED)
    verdict = await env.commit(progress.take_up(export, now=env.now()))
    if not isinstance(verdict, Applied):
        return Exported.FENCED
    (taken,) = verdict.rows
    assert isinstance(taken, Export)
    return await _build_or_release(env, taken)


async def _build_or_release(env: Context, export: Export) -> Exported:
    try:
        return await _make(env, export)
    except OwnershipLost:
        return Exported.FENCED
    except DamagedBody as error:
        # The body cannot be restored. The caller gets the task's id and can run the task again.
        change = progress.give_up(export, str(error), now=env.now())
        return await _commit_or_defer(env, change, Exported.FAILED)
    except StorageFull:
        change = progress.defer(export, "storage is full", now=env.now())
        return await _commit_or_defer(env, change, Exported.DEFERRED)
    except Unavailable:
        return await _release(env, export, delay_s=progress.DEFER_S)
    except trio.Cancelled:
        # Without this release, the export would wait until the claim lapses and have one attempt
        # less.
        with trio.move_on_after(_LET_GO_S, shield=True):
            await _release(env, export, delay_s=0)
        raise


async def _release(env: Context, export: Export, *, delay_s: float) -> Exported:
    now = env.now()
    change = progress.release(export, due_at=now + delay_s, now=now)
    return await _commit_or_defer(env, change, Exported.DEFERRED)


async def _commit_or_defer(env: Context, change: Change, done: Exported) -> Exported:
    """Commits the change. If the store is unavailable, the claim lapses and the export is due
    again."""
    try:
        verdict = await env.commit(change)
    except Unavailable:
        return Exported.DEFERRED
    return done if isinstance(verdict, Applied) else Exported.FENCED


async def _make(env: Context, export: Export) -> Exported:
    job = await env.store.read(JobKey(export.job_id))
    run = await env.store.read(RunKey(export.job_id, export.run_id))
    if job is None or run is None:
        return Exported.FENCED
    missing = missing_package(export.format)
    if missing is not None:  # The API has it, so it accepted the request.
        error = f"this worker cannot write {export.format} files: install {missing} on every worker"
        change = progress.give_up(export, error, now=env.now())
        return await _commit_or_defer(env, change, Exported.FAILED)
    walk = ExportWriter(env, export, run, job.format, await expiries_of(env, run))
    async with aclosing(walk.pieces()) as pieces:
        stored = await env.blobs.put_stream(f"{_own_prefix(export)}/file", pieces)
    change = progress.publish(
        export,
        key=stored.key,
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        manifest=walk.manifest(),
        now=env.now(),
    )
    if isinstance(await env.commit(change), Applied):
        return Exported.COMPLETED if export.destination is None else Exported.DEFERRED
    # Another exporter has acquired the export: remove only the file of this epoch.
    await env.blobs.delete_prefix(_own_prefix(export))
    return Exported.FENCED


def _prefix(export: Export) -> str:
    return f"jobs/{export.job_id}/exports/{export.run_id}/{export.export_id}"


def _own_prefix(export: Export) -> str:
    """Returns the prefix of this epoch, so that an exporter that was overtaken cannot touch the
    file of its successor."""
    return f"{_prefix(export)}/{export.epoch}"


# Deliveries: a complete file is put to its destination, again and again until it is there or the
# export expires. Each attempt is claimed by a new epoch, like the building of the file.


async def _deliver(env: Context, export: Export) -> Exported:
    verdict = await env.commit(progress.claim_delivery(export, now=env.now()))
    if not isinstance(verdict, Applied):
        return Exported.FENCED
    (claimed,) = verdict.rows
    assert isinstance(claimed, Export)
    try:
        return await _put(env, claimed)
    except (CannotUnseal, NotFound, ResultDamaged) as error:
        change = progress.give_up(claimed, f"the file cannot be delivered: {error}", now=env.now())
        return await _commit_or_defer(env, change, Exported.FAILED)
    except Unavailable:
        change = progress.defer_delivery(claimed, None, delay_s=progress.DEFER_S, now=env.now())
        return await _commit_or_defer(env, change, Exported.DEFERRED)
    except trio.Cancelled:
        with trio.move_on_after(_LET_GO_S, shield=True):
            change = progress.defer_delivery(claimed, None, delay_s=0, now=env.now())
            await _commit_or_defer(env, change, Exported.DEFERRED)
        raise


async def _put(env: Context, export: Export) -> Exported:
    try:
        _, run = await visible_run(env, export.job_id, export.run_id, absent=_ABSENT)
    except NotFound:  # The run was deleted meanwhile.
        return Exported.FENCED
    sealed, key, sha256 = export.destination_sealed, export.key, export.sha256
    assert sealed is not None
    assert key is not None
    assert sha256 is not None
    if env.export_sink is None:
        raise Unavailable("this process delivers no files")
    place = _sealing_context(run.caller, export.job_id, export.export_id)
    opened = env.secret_box.unseal(sealed, place=place)
    pieces = await results.whole_body(
        env, key, size_bytes=export.size_bytes, sha256=sha256, absent="the file is not stored"
    )
    async with aclosing(pieces):
        file = OutgoingFile(
            destination=msgspec.json.decode(opened, type=Destination),
            partition=run.caller,
            content_type=ENCODERS[export.format].media_type,
            size_bytes=export.size_bytes,
            pieces=pieces,
        )
        outcome = await _put_under_claim(env, env.export_sink, export, file)
    if outcome is None:
        return Exported.FENCED
    if isinstance(outcome, Delivered):
        change = progress.record_delivery(export, now=env.now())
        return await _commit_or_defer(env, change, Exported.COMPLETED)
    delay_s = next_delivery_s(export.failures + 1, retry_after_s=None, random=env.random)
    if env.now() + delay_s >= export.expires_at:
        change = progress.give_up(export, outcome.error, now=env.now())
        return await _commit_or_defer(env, change, Exported.FAILED)
    change = progress.defer_delivery(export, outcome.error, delay_s=delay_s, now=env.now())
    return await _commit_or_defer(env, change, Exported.DEFERRED)


async def _put_under_claim(
    env: Context, sink: ExportSink, export: Export, file: OutgoingFile
) -> Delivered | NotDelivered | None:
    """Puts the file while the claim is renewed. Returns None if the claim was lost."""
    outcome: Delivered | NotDelivered | None = None
    # Collected instead of raised, because a nursery would wrap it in an exception group.
    failures: list[ConveyorError] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_delivery, env, export, nursery.cancel_scope)
        try:
            outcome = await sink.put(file)
        except ConveyorError as error:
            failures.append(error)
        nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return outcome


async def _keep_delivery(env: Context, export: Export, work: trio.CancelScope) -> None:
    while True:
        await trio.sleep(_BEAT_S)
        # After an outage the claim may have lapsed: then the next renewal is refused.
        with suppress(Unavailable):
            verdict = await env.commit(progress.beat_delivery(export, now=env.now()))
            if not isinstance(verdict, Applied):
                work.cancel()
