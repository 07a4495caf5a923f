"""The tables of the memory engine, and each query over them (docs/storage.md, Queries)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from conveyor.domain.backpressure.budget import Budget, BudgetReservation
from conveyor.domain.changes import (
    BatchKey,
    BudgetKey,
    EventKey,
    ExportKey,
    FeedKey,
    InputKey,
    JobKey,
    NoticeKey,
    RecordKey,
    Row,
    RunKey,
    ScheduleKey,
    ScrubKey,
    ShareKey,
    SigningKeysKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.export.export import Export
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import (
    Batch,
    DeletionIntent,
    Event,
    EventSequence,
    IdempotencyRecord,
    Job,
    JobInput,
    Notice,
    Run,
    ShardCounters,
    SigningKeys,
    Task,
)
from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    DueExpiries,
    DueExports,
    DueNotices,
    DueSchedules,
    DueScrubs,
    EventsOf,
    ExpiredInputs,
    JobsOf,
    NoticesOf,
    RunsIn,
    RunsOf,
    StatsOf,
    TasksOf,
    UnplacedEvents,
)
from conveyor.domain.schedule.schedule import Schedule

Address = tuple[Any, ...]
Table = dict[Address, Any]


class Tables:
    """All rows by their addresses, and the queries in the order that each promises."""

    def __init__(self) -> None:
        self._jobs: dict[Address, Job] = {}
        self._runs: dict[Address, Run] = {}
        self._batches: dict[Address, Batch] = {}
        self._stats: dict[Address, ShardCounters] = {}
        self._tasks: dict[Address, Task] = {}
        self._records: dict[Address, IdempotencyRecord] = {}
        self._notices: dict[Address, Notice] = {}
        self._scrubs: dict[Address, DeletionIntent] = {}
        self._events: dict[Address, Event] = {}
        self._feeds: dict[Address, EventSequence] = {}
        self._signing_keys: dict[Address, SigningKeys] = {}
        self._schedules: dict[Address, Schedule] = {}
        self._exports: dict[Address, Export] = {}
        self._inputs: dict[Address, JobInput] = {}
        self._budgets: dict[Address, Budget] = {}
        self._shares: dict[Address, BudgetReservation] = {}
        self._tables: dict[type, Table] = {
            BudgetKey: self._budgets,
            ShareKey: self._shares,
            JobKey: self._jobs,
            RunKey: self._runs,
            BatchKey: self._batches,
            StatsKey: self._stats,
            TaskKey: self._tasks,
            RecordKey: self._records,
            NoticeKey: self._notices,
            ScrubKey: self._scrubs,
            EventKey: self._events,
            FeedKey: self._feeds,
            SigningKeysKey: self._signing_keys,
            ScheduleKey: self._schedules,
            ExportKey: self._exports,
            InputKey: self._inputs,
        }

    def rows(self) -> Mapping[type, Mapping[Address, Row]]:
        """Returns all rows by the type of their key and their address, for checkers."""
        return self._tables

    def find_rows(self, query: AnyQuery) -> Sequence[Row]:  # noqa: C901, PLR0912 (one branch a kind)
        match query:
            case TasksOf():
                return self._tasks_of(query)
            case StatsOf():
                return self._stats_of(query)
            case JobsOf():
                return self._jobs_of(query)
            case RunsOf():
                return self._runs_of(query)
            case BatchesOf():
                return self._batches_of(query)
            case RunsIn():
                return self._runs_in(query)
            case BatchesIn():
                return self._batches_in(query)
            case DueNotices():
                return self._due_notices(query)
            case NoticesOf():
                return self._notices_of(query)
            case DueScrubs():
                return self._due_scrubs(query)
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
            case _:
                assert_never(query)

    def _tasks_of(self, query: TasksOf) -> list[Task]:
        found = [
            task
            for task in self._tasks.values()
            if task.run_id == query.run_id
            and (query.statuses is None or task.status in query.statuses)
            and (query.after is None or task.task_id > query.after)
        ]
        return sorted(found, key=lambda task: task.task_id)[: query.limit]

    def _stats_of(self, query: StatsOf) -> list[ShardCounters]:
        found = [row for row in self._stats.values() if _in_run(row, query.job_id, query.run_id)]
        return sorted(found, key=lambda row: row.shard)

    def _jobs_of(self, query: JobsOf) -> list[Job]:
        found = [
            job
            for job in self._jobs.values()
            if job.caller == query.caller
            and job.status in query.statuses
            and query.type in {None, job.type}
            and (query.external_id is None or job.external_id == query.external_id)
            and (query.before is None or job.job_id < query.before)
        ]
        return sorted(found, key=lambda job: job.job_id, reverse=True)[: query.limit]

    def _runs_of(self, query: RunsOf) -> list[Run]:
        found = [
            run
            for run in self._runs.values()
            if run.job_id == query.job_id
            and run.status in query.statuses
            and (query.before is None or run.sequence < query.before)
        ]
        return sorted(found, key=lambda run: run.sequence, reverse=True)[: query.limit]

    def _batches_of(self, query: BatchesOf) -> list[Batch]:
        found = [row for row in self._batches.values() if _in_run(row, query.job_id, query.run_id)]
        return sorted(found, key=lambda batch: (batch.created_at, batch.batch_id))

    def _runs_in(self, query: RunsIn) -> list[Run]:
        found = [
            run
            for run in self._runs.values()
            if run.status in query.statuses
            and run.updated_at >= query.updated_since
            and (query.after is None or run.run_id > query.after)
        ]
        return sorted(found, key=lambda run: run.run_id)[: query.limit]

    def _batches_in(self, query: BatchesIn) -> list[Batch]:
        found = [
            batch
            for batch in self._batches.values()
            if batch.status in query.statuses and batch.updated_at <= query.idle_since
        ]
        in_order = sorted(found, key=lambda each: (each.updated_at, each.run_id, each.batch_id))
        return in_order[: query.limit]

    def _due_notices(self, query: DueNotices) -> list[Notice]:
        found = [
            notice
            for notice in self._notices.values()
            if notice.status in query.statuses and notice.due_at <= query.due_by
        ]
        return sorted(found, key=lambda each: (each.due_at, each.notice_id))[: query.limit]

    def _notices_of(self, query: NoticesOf) -> list[Notice]:
        found = [
            notice
            for notice in self._notices.values()
            if notice.job_id == query.job_id
            and query.run_id in {None, notice.run_id}
            and (query.before is None or _place(notice) < query.before)
        ]
        return sorted(found, key=_place, reverse=True)[: query.limit]

    def _due_scrubs(self, query: DueScrubs) -> list[DeletionIntent]:
        found = [scrub for scrub in self._scrubs.values() if scrub.due_at <= query.due_by]
        return sorted(found, key=lambda each: (each.due_at, each.scrub_id))[: query.limit]

    def _events_of(self, query: EventsOf) -> list[Event]:
        found = [
            event
            for event in self._events.values()
            if event.caller == query.caller and event.seq > max(0, query.after)
        ]
        return sorted(found, key=lambda event: event.seq)[: query.limit]

    def _unplaced_events(self, query: UnplacedEvents) -> list[Event]:
        found = [
            event
            for event in self._events.values()
            if event.seq == 0 and event.occurred_at < query.before
        ]
        in_order = sorted(found, key=lambda event: (event.occurred_at, event.event_id))
        return in_order[: query.limit]

    def _due_schedules(self, query: DueSchedules) -> list[Schedule]:
        found = [
            (each.next_fire_at, each.job_id, each)
            for each in self._schedules.values()
            if each.status in query.statuses
            and each.next_fire_at is not None
            and each.next_fire_at <= query.due_by
            and (query.after is None or (each.next_fire_at, each.job_id) > query.after)
        ]
        in_order = sorted(found, key=lambda row: row[:2])
        return [schedule for _, _, schedule in in_order[: query.limit]]

    def _due_exports(self, query: DueExports) -> list[Export]:
        found = [export for export in self._exports.values() if export.due_at <= query.due_by]
        return sorted(found, key=lambda each: (each.due_at, each.export_id))[: query.limit]

    def _due_expiries(self, query: DueExpiries) -> list[Run]:
        found = [
            (run.sweep_at, run.run_id, run)
            for run in self._runs.values()
            if run.sweep_at is not None and run.sweep_at <= query.due_by
        ]
        return [run for *_, run in sorted(found)[: query.limit]]

    def _expired_inputs(self, query: ExpiredInputs) -> list[JobInput]:
        found = [slot for slot in self._inputs.values() if slot.expires_at <= query.expired_by]
        return sorted(found, key=lambda each: (each.expires_at, each.input_id))[: query.limit]


def _place(notice: Notice) -> tuple[str, float, str]:
    return notice.run_id, notice.occurred_at, notice.notice_id


def _in_run(row: Batch | ShardCounters, job_id: JobId, run_id: RunId) -> bool:
    return row.job_id == job_id and row.run_id == run_id
