"""MemoryStore: one dict per row kind, the queries over them, and the queue for effects
(docs/engines.md; docs/storage.md, Queries)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, assert_never, cast

import msgspec
import trio

from conveyor.domain.changes import (
    KIND_OF_KEY,
    KINDS_OF_RUN,
    ROW_KINDS,
    AnyKey,
    Applied,
    BatchKey,
    Change,
    Chunk,
    CrawlKey,
    CrawlStepKey,
    CrossingKey,
    Delete,
    Enqueue,
    EventKey,
    Expiry,
    ExportKey,
    InputKey,
    Insert,
    JobKey,
    Key,
    NoticeKey,
    OpenQueue,
    R,
    Row,
    RunKey,
    SampleKey,
    ScheduleKey,
    ScrubKey,
    SettleChange,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
    Write,
    find_refusal,
)
from conveyor.domain.crawl_record import Crawl, CrawlStep
from conveyor.domain.export_record import Export
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import (
    Batch,
    CounterSample,
    Crossing,
    DeletionIntent,
    Event,
    Job,
    JobInput,
    Notice,
    Run,
    ShardCounters,
    Task,
)
from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    CrawlStepsOf,
    DueCrawls,
    DueExpiries,
    DueExports,
    DueNotices,
    DueSchedules,
    DueScrubs,
    EventsOf,
    ExpiredInputs,
    JobsOf,
    NoticesOf,
    Q,
    Query,
    RunsIn,
    RunsOf,
    SamplesOf,
    StatsOf,
    TaskPage,
    TasksAt,
    TasksOf,
    UnfinishedCrossings,
    UnplacedEvents,
    page_of,
)
from conveyor.domain.schedule import Schedule
from conveyor.engines.memory.queue import MemoryQueue

Address = tuple[Any, ...]
Table = dict[Address, Any]


class Tables:
    """All rows by their addresses, and the queries in the order that each promises."""

    def __init__(self) -> None:
        self._tables: dict[type, Table] = {kind.key_type: {} for kind in ROW_KINDS}
        # The tables that queries read, with the types of their rows.
        self._jobs: dict[Address, Job] = self._tables[JobKey]
        self._runs: dict[Address, Run] = self._tables[RunKey]
        self._batches: dict[Address, Batch] = self._tables[BatchKey]
        self._stats: dict[Address, ShardCounters] = self._tables[StatsKey]
        self._tasks: dict[Address, Task] = self._tables[TaskKey]
        self._notices: dict[Address, Notice] = self._tables[NoticeKey]
        self._intents: dict[Address, DeletionIntent] = self._tables[ScrubKey]
        self._crossings: dict[Address, Crossing] = self._tables[CrossingKey]
        self._events: dict[Address, Event] = self._tables[EventKey]
        self._schedules: dict[Address, Schedule] = self._tables[ScheduleKey]
        self._exports: dict[Address, Export] = self._tables[ExportKey]
        self._inputs: dict[Address, JobInput] = self._tables[InputKey]
        self._samples: dict[Address, CounterSample] = self._tables[SampleKey]
        self._crawls: dict[Address, Crawl] = self._tables[CrawlKey]
        self._crawl_steps: dict[Address, CrawlStep] = self._tables[CrawlStepKey]

    def rows(self) -> Mapping[type, Mapping[Address, Row]]:
        """Returns all rows by the type of their key and their address, for checkers."""
        return self._tables

    def find_rows(self, query: AnyQuery) -> Sequence[Row]:  # noqa: C901, PLR0912 (one branch a kind)
        match query:
            case TasksOf():
                return self._tasks_of(query)
            case TasksAt():
                places = dict.fromkeys((ref.run_id, ref.task_id) for ref in query.refs)
                return [self._tasks[place] for place in places if place in self._tasks]
            case StatsOf():
                return self._stats_of(query)
            case JobsOf():
                return self._jobs_of(query)
            case RunsOf():
                return self._runs_of(query)
            case BatchesOf():
                return self._batches_of(query)
            case SamplesOf():
                return self._samples_of(query)
            case RunsIn():
                return self._runs_in(query)
            case BatchesIn():
                return self._batches_in(query)
            case DueNotices():
                return self._due_notices(query)
            case NoticesOf():
                return self._notices_of(query)
            case DueScrubs():
                return self._due_deletions(query)
            case UnfinishedCrossings():
                return self._unfinished_crossings(query)
            case EventsOf():
                return self._events_of(query)
            case UnplacedEvents():
                return self._unplaced_events(query)
            case DueSchedules():
                return self._due_schedules(query)
            case DueExports():
                return self._due_exports(query)
            case DueExpiries():
                return self._due_expiries(query)
            case ExpiredInputs():
                return self._expired_inputs(query)
            case DueCrawls():
                return self._due_crawls(query)
            case CrawlStepsOf():
                return self._crawl_steps_of(query)
            case _:
                assert_never(query)

    def _tasks_of(self, query: TasksOf) -> list[Task]:
        rows = [
            task
            for task in self._tasks.values()
            if task.run_id == query.run_id
            and (query.statuses is None or task.status in query.statuses)
            and (query.after is None or task.task_id > query.after)
        ]
        return sorted(rows, key=lambda task: task.task_id)[: query.limit]

    def _stats_of(self, query: StatsOf) -> list[ShardCounters]:
        rows = [row for row in self._stats.values() if _in_run(row, query.job_id, query.run_id)]
        return sorted(rows, key=lambda row: row.shard)

    def _jobs_of(self, query: JobsOf) -> list[Job]:
        rows = [
            job
            for job in self._jobs.values()
            if job.caller == query.caller
            and job.status in query.statuses
            and query.type in {None, job.type}
            and (query.external_id is None or job.external_id == query.external_id)
            and (query.before is None or job.job_id < query.before)
        ]
        return sorted(rows, key=lambda job: job.job_id, reverse=True)[: query.limit]

    def _runs_of(self, query: RunsOf) -> list[Run]:
        rows = [
            run
            for run in self._runs.values()
            if run.job_id == query.job_id
            and run.status in query.statuses
            and (query.before is None or run.sequence < query.before)
        ]
        return sorted(rows, key=lambda run: run.sequence, reverse=True)[: query.limit]

    def _batches_of(self, query: BatchesOf) -> list[Batch]:
        rows = [row for row in self._batches.values() if _in_run(row, query.job_id, query.run_id)]
        return sorted(rows, key=lambda batch: (batch.created_at, batch.batch_id))

    def _samples_of(self, query: SamplesOf) -> list[CounterSample]:
        rows = [row for row in self._samples.values() if _in_run(row, query.job_id, query.run_id)]
        return sorted(rows, key=lambda sample: sample.minute)[: query.limit]

    def _runs_in(self, query: RunsIn) -> list[Run]:
        rows = [
            run
            for run in self._runs.values()
            if run.status in query.statuses
            and run.updated_at >= query.updated_since
            and (query.after is None or run.run_id > query.after)
        ]
        return sorted(rows, key=lambda run: run.run_id)[: query.limit]

    def _batches_in(self, query: BatchesIn) -> list[Batch]:
        rows = [
            batch
            for batch in self._batches.values()
            if batch.status in query.statuses and batch.updated_at <= query.idle_since
        ]
        in_order = sorted(rows, key=lambda batch: (batch.updated_at, batch.run_id, batch.batch_id))
        return in_order[: query.limit]

    def _due_notices(self, query: DueNotices) -> list[Notice]:
        rows = [
            notice
            for notice in self._notices.values()
            if notice.status in query.statuses and notice.due_at <= query.due_by
        ]
        return sorted(rows, key=lambda notice: (notice.due_at, notice.notice_id))[: query.limit]

    def _notices_of(self, query: NoticesOf) -> list[Notice]:
        rows = [
            notice
            for notice in self._notices.values()
            if notice.job_id == query.job_id
            and query.run_id in {None, notice.run_id}
            and (query.before is None or _place(notice) < query.before)
        ]
        return sorted(rows, key=_place, reverse=True)[: query.limit]

    def _due_deletions(self, query: DueScrubs) -> list[DeletionIntent]:
        rows = [intent for intent in self._intents.values() if intent.due_at <= query.due_by]
        return sorted(rows, key=lambda intent: (intent.due_at, intent.scrub_id))[: query.limit]

    def _unfinished_crossings(self, query: UnfinishedCrossings) -> list[Crossing]:
        rows = sorted(self._crossings.values(), key=lambda row: (row.made_at, row.job_id))
        return rows[: query.limit]

    def _events_of(self, query: EventsOf) -> list[Event]:
        rows = [
            event
            for event in self._events.values()
            if event.caller == query.caller and event.seq > max(0, query.after)
        ]
        return sorted(rows, key=lambda event: event.seq)[: query.limit]

    def _unplaced_events(self, query: UnplacedEvents) -> list[Event]:
        rows = [
            event
            for event in self._events.values()
            if event.seq == 0 and event.occurred_at < query.before
        ]
        in_order = sorted(rows, key=lambda event: (event.occurred_at, event.event_id))
        return in_order[: query.limit]

    def _due_schedules(self, query: DueSchedules) -> list[Schedule]:
        rows = [
            (schedule.next_fire_at, schedule.job_id, schedule)
            for schedule in self._schedules.values()
            if schedule.status in query.statuses
            and schedule.next_fire_at is not None
            and schedule.next_fire_at <= query.due_by
            and (query.after is None or (schedule.next_fire_at, schedule.job_id) > query.after)
        ]
        in_order = sorted(rows, key=lambda row: row[:2])
        return [schedule for _, _, schedule in in_order[: query.limit]]

    def _due_exports(self, query: DueExports) -> list[Export]:
        rows = [export for export in self._exports.values() if export.due_at <= query.due_by]
        return sorted(rows, key=lambda export: (export.due_at, export.export_id))[: query.limit]

    def _due_expiries(self, query: DueExpiries) -> list[Run]:
        rows = [
            (run.sweep_at, run.run_id, run)
            for run in self._runs.values()
            if run.sweep_at is not None and run.sweep_at <= query.due_by
        ]
        return [run for *_, run in sorted(rows)[: query.limit]]

    def _expired_inputs(self, query: ExpiredInputs) -> list[JobInput]:
        rows = [slot for slot in self._inputs.values() if slot.expires_at <= query.expired_by]
        return sorted(rows, key=lambda upload: (upload.expires_at, upload.input_id))[: query.limit]

    def _due_crawls(self, query: DueCrawls) -> list[Crawl]:
        rows = [
            (crawl.due_at, crawl.job_id, crawl)
            for crawl in self._crawls.values()
            if crawl.due_at is not None and crawl.due_at <= query.due_by
        ]
        return [crawl for *_, crawl in sorted(rows)[: query.limit]]

    def _crawl_steps_of(self, query: CrawlStepsOf) -> list[CrawlStep]:
        rows = [
            step
            for step in self._crawl_steps.values()
            if _in_run(step, query.job_id, query.run_id) and step.number >= query.first
        ]
        return sorted(rows, key=lambda step: step.number)[: query.limit]


def _place(notice: Notice) -> tuple[str, float, str]:
    return notice.run_id, notice.occurred_at, notice.notice_id


def _in_run(
    row: Batch | ShardCounters | CounterSample | CrawlStep, job_id: JobId, run_id: RunId
) -> bool:
    return row.job_id == job_id and row.run_id == run_id


class MemoryStore(Tables):
    def __init__(self, queue: MemoryQueue) -> None:
        super().__init__()
        self._queue = queue

    async def read(self, key: Key[R]) -> R | None:
        await trio.lowlevel.checkpoint()
        return cast("R | None", self._row(cast("AnyKey", key)))

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for change in changes:
            # The law is that changes of one call are judged one by one. The checkpoint lets other
            # callers write in between, as they may with a real engine.
            await trio.lowlevel.checkpoint()
            verdicts.append(self._apply(change))
        if all(isinstance(change, SettleChange) for change in changes):
            return list(map(self._with_counter, changes, verdicts))
        return verdicts

    def _with_counter(self, change: Change, verdict: Verdict) -> Verdict:
        """Replaces the counters of a settle by those after the whole call."""
        assert isinstance(change, SettleChange)
        if not isinstance(verdict, Applied) or change.count.is_quiet:
            return verdict
        return Applied((verdict.rows[0], self._row(change.count.key)))

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        await trio.lowlevel.checkpoint()
        change = Change((chunk.checkpoint, *chunk.count_updates()), (Enqueue(chunk.refs),))
        verdict = self._apply(change)
        if isinstance(verdict, Applied):
            for task in chunk.tasks:
                # A task that exists is kept: a repeated step must not reset it.
                self._tasks.setdefault((task.run_id, task.task_id), task)
            return Applied(verdict.rows[:1])
        return verdict

    async def find(self, query: Query[Q]) -> list[Q]:
        await trio.lowlevel.checkpoint()
        return cast("list[Q]", self.find_rows(cast("AnyQuery", query)))

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        """Reads at most `read_max` rows, although it could read all: callers must handle pages that
        end early, and this engine tests them."""
        await trio.lowlevel.checkpoint()
        read = self._tasks_of(msgspec.structs.replace(query, statuses=None, limit=read_max))
        matching = [row for row in read if query.statuses is None or row.status in query.statuses]
        page = page_of(matching[: query.limit], query)
        if page.until is None and len(read) == read_max:
            return TaskPage(page.tasks, read[-1].task_id)
        return page

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        await trio.lowlevel.checkpoint()
        doomed = list(islice(self._rows_to_delete(job_id, run_id), limit))
        for table, address in doomed:
            del table[address]
        return len(doomed)

    async def delete_expired(self, now: float) -> int:
        await trio.lowlevel.checkpoint()
        expired = [
            (table, address)
            for kind in ROW_KINDS
            if kind.expiry is Expiry.STORE
            for table in [self._tables[kind.key_type]]
            for address, row in table.items()
            if row.expires_at < now
        ]
        for table, address in expired:
            del table[address]
        return len(expired)

    def _row(self, key: AnyKey) -> Row | None:
        table, address = self._place(key)
        row: Row | None = table.get(address)
        return row

    def _place(self, key: AnyKey) -> tuple[Table, Address]:
        return self._tables[type(key)], KIND_OF_KEY[type(key)].address_of(key)

    def _apply(self, change: Change) -> Verdict:
        rows = {write.key: self._row(write.key) for write in change.writes}
        assert len(rows) == len(change.writes), "two writes to one row in one change"
        # All guards are checked before the first write, so a refused change writes nothing.
        refusal = find_refusal(change.writes, rows)
        if refusal is not None:
            return refusal
        written = tuple(self._write(write) for write in change.writes)
        for effect in change.effects:
            if isinstance(effect, OpenQueue):
                self._queue.open_nowait(effect.run_id)
            else:
                self._queue.enqueue_nowait(effect.refs)
        return Applied(written)

    def _write(self, write: Write) -> Row | None:
        table, address = self._place(write.key)
        match write:
            case Insert():
                table[address] = write.row
            case Update():
                assert not write.values.keys() & write.deltas.keys()
                old = table[address]
                sums = {name: getattr(old, name) + delta for name, delta in write.deltas.items()}
                table[address] = msgspec.structs.replace(old, **write.values, **sums)
            case Delete():
                table.pop(address, None)
            case _:
                assert_never(write)
        return None if isinstance(write, Update) and write.is_quiet else table.get(address)

    def _rows_to_delete(
        self, job_id: JobId, run_id: RunId | None
    ) -> Iterator[tuple[Table, Address]]:
        runs = [run for run in self._runs.values() if run.job_id == job_id]
        run_ids = {run.run_id for run in runs} if run_id is None else {run_id}
        for kind in KINDS_OF_RUN:
            table = self._tables[kind.key_type]
            for address, row in table.items():
                if isinstance(row, Task):  # A task row has no job id.
                    is_doomed = row.run_id in run_ids
                else:
                    is_doomed = row.job_id == job_id and run_id in {None, row.run_id}
                if is_doomed:
                    yield table, address
