"""One query of every kind, whose results are compared between engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.model import BatchStatus, JobStatus, JobType, NoticeStatus, RunStatus
from conveyor.domain.queries import (
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
    TasksOf,
    UnfinishedCrossings,
    UnplacedEvents,
)
from conveyor.domain.schedule import ScheduleStatus
from conveyor.ports.store import Store
from tests.builders import CALLER

SHARD_COUNT = 2

Question = Callable[[Store], Awaitable[Sequence[object]]]


def make_questions(
    job_id: JobId, run_id: RunId, *, now: float, after: TaskId | None = None, limit: int = 50
) -> list[Question]:
    running, ended = frozenset({RunStatus.RUNNING}), frozenset({RunStatus.STOPPED})
    return [
        _find_by(
            TasksOf(job_id=job_id, run_id=run_id, shard_count=SHARD_COUNT, after=after, limit=limit)
        ),
        _find_by(StatsOf(job_id=job_id, run_id=run_id, shard_count=SHARD_COUNT)),
        _find_by(JobsOf(caller=CALLER, statuses=frozenset(JobStatus), limit=limit)),
        _find_by(
            JobsOf(caller=CALLER, statuses=frozenset(JobStatus), type=JobType.REGULAR, limit=limit)
        ),
        _find_by(RunsOf(job_id=job_id, statuses=frozenset(RunStatus), limit=limit)),
        _find_by(BatchesOf(job_id=job_id, run_id=run_id)),
        _find_by(SamplesOf(job_id=job_id, run_id=run_id, limit=limit)),
        _find_by(RunsIn(statuses=running, after=run_id if after else None, limit=limit)),
        _find_by(RunsIn(statuses=running | ended, updated_since=now - 5, limit=limit)),
        _find_by(BatchesIn(statuses=frozenset(BatchStatus), idle_since=now - 5, limit=limit)),
        _find_by(DueNotices(statuses=frozenset(NoticeStatus), due_by=now, limit=limit)),
        _find_by(NoticesOf(job_id=job_id, limit=limit)),
        _find_by(NoticesOf(job_id=job_id, run_id=run_id, limit=limit)),
        _find_by(DueScrubs(due_by=now, limit=limit)),
        _find_by(UnfinishedCrossings(limit=limit)),
        _find_by(EventsOf(caller=CALLER, after=limit // 2, limit=limit)),
        _find_by(UnplacedEvents(before=now - 5, limit=limit)),
        _find_by(DueSchedules(statuses=frozenset(ScheduleStatus), due_by=now, limit=limit)),
        _find_by(
            DueSchedules(
                statuses=frozenset({ScheduleStatus.ACTIVE}),
                due_by=now + 5,
                after=(now, job_id),
                limit=limit,
            )
        ),
        _find_by(DueExports(due_by=now, limit=limit)),
        _find_by(DueExpiries(due_by=now, limit=limit)),
        _find_by(ExpiredInputs(expired_by=now, limit=limit)),
        _find_by(DueCrawls(due_by=now, limit=limit)),
        _find_by(CrawlStepsOf(job_id=job_id, run_id=run_id, first=2, limit=limit)),
    ]


def _find_by(query: Query[Q]) -> Question:
    return lambda store: store.find(query)
