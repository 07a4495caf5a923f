"""Builders of rows, keys and writes: a test names only the fields that matter to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec

from conveyor.domain.budget import Budget, BudgetReservation, Unit
from conveyor.domain.changes import (
    ANY,
    KIND_OF_ROW,
    Applied,
    Change,
    Delete,
    Enqueue,
    Guard,
    Insert,
    Key,
    R,
    Row,
    Update,
    Write,
)
from conveyor.domain.crawl_record import (
    Crawl,
    CrawlEntry,
    CrawlRules,
    CrawlStatus,
    CrawlStep,
    EntryKind,
)
from conveyor.domain.errors import make_problem
from conveyor.domain.export_record import Export, ExportFormat, ExportStatus
from conveyor.domain.ids import (
    FIRST_BATCH,
    CallerId,
    EventId,
    ExportId,
    InputId,
    JobId,
    NoticeId,
    RunId,
    TaskId,
    task_id,
)
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    CounterSample,
    CounterState,
    Crossing,
    DeletionIntent,
    Event,
    EventSequence,
    EventType,
    IdempotencyRecord,
    Job,
    JobInput,
    JobStatus,
    ListFormat,
    ListSpec,
    Notice,
    NoticeStatus,
    Run,
    RunStatus,
    ShardCounters,
    SigningKey,
    SigningKeys,
    StagedList,
    Task,
    TaskRef,
    TaskStatus,
)
from conveyor.domain.schedule import Overlap, Rate, RateUnit, Schedule, ScheduleStatus
from conveyor.ports.clock import Clock
from conveyor.ports.store import Store

T0 = 1_700_000_000.0


@dataclass(slots=True)
class ManualClock:
    """A clock that only the test moves, so its time does not depend on threads or virtual time."""

    at: float = T0
    steady_at: float = T0

    def now(self) -> float:
        return self.at

    def steady(self) -> float:
        return self.steady_at

    def advance(self, seconds: float) -> None:
        """Lets time pass: moves the wall clock and the steady clock."""
        self.at += seconds
        self.steady_at += seconds

    def step(self, seconds: float) -> None:
        """Sets the wall clock without letting time pass."""
        self.at += seconds


@dataclass(slots=True)
class ServerClock:
    """The clock of a remote service: setting the worker's wall clock does not change it."""

    worker: Clock

    def now(self) -> float:
        return self.worker.steady()

    def steady(self) -> float:
        return self.worker.steady()


def a_ulid(number: int) -> str:
    """Makes a ULID that is easy to recognize and sorts by its number."""
    return f"{number:026d}"


CALLER = CallerId("caller-a")
JOB = JobId(a_ulid(1))
RUN = RunId(a_ulid(101))
OTHER_JOB = JobId(a_ulid(2))
OTHER_RUN = RunId(a_ulid(202))


def a_job(job_id: JobId = JOB, **fields: Any) -> Job:
    job = Job(job_id=job_id, caller=CALLER, status=JobStatus.OPEN, created_at=T0, updated_at=T0)
    return msgspec.structs.replace(job, **fields)


def a_run(run_id: RunId = RUN, **fields: Any) -> Run:
    run = Run(
        job_id=JOB,
        run_id=run_id,
        caller=CALLER,
        sequence=1,
        status=RunStatus.RUNNING,
        created_at=T0,
        updated_at=T0,
    )
    return msgspec.structs.replace(run, **fields)


def a_batch(run_id: RunId = RUN, **fields: Any) -> Batch:
    batch = Batch(
        job_id=JOB,
        run_id=run_id,
        batch_id=FIRST_BATCH,
        status=BatchStatus.OPEN,
        total=0,
        created_at=T0,
        updated_at=T0,
    )
    return msgspec.structs.replace(batch, **fields)


def a_stats(shard: int = 0, run_id: RunId = RUN, **fields: Any) -> ShardCounters:
    stats = ShardCounters(job_id=JOB, run_id=run_id, shard=shard, status=CounterState.OPEN)
    return msgspec.structs.replace(stats, **fields)


def a_task(index: int = 0, run_id: RunId = RUN, **fields: Any) -> Task:
    task = Task(
        run_id=run_id,
        task_id=task_id(run_id, FIRST_BATCH, index),
        shard=0,
        batch_id=FIRST_BATCH,
        index=index,
        url=f"https://example.com/{index}",
        status=TaskStatus.PENDING,
        created_at=T0,
        updated_at=T0,
    )
    if fields.get("status") is TaskStatus.FAILED:  # A failed task always has a problem.
        fields = {"problem": make_problem("target_not_found", "No such page", 404, "404"), **fields}
    return msgspec.structs.replace(task, **fields)


def a_record(key_id: str = "key-1", **fields: Any) -> IdempotencyRecord:
    record = IdempotencyRecord(
        key_id=key_id,
        caller=CALLER,
        fingerprint="fingerprint",
        subject=a_ulid(1),
        owner="owner",
        claimed_until=T0 + 90,
        expires_at=T0 + 3600,
    )
    return msgspec.structs.replace(record, **fields)


def a_notice(number: int = 1, **fields: Any) -> Notice:
    notice = Notice(
        notice_id=NoticeId(f"NOTICE{number:020d}"),
        job_id=JOB,
        run_id=RUN,
        event_type="run.completed",
        status=NoticeStatus.DUE,
        occurred_at=T0,
        due_at=T0,
        due_since=T0,
        payload="{}",
    )
    return msgspec.structs.replace(notice, **fields)


def a_deletion_intent(number: int = 1, **fields: Any) -> DeletionIntent:
    intent = DeletionIntent(
        job_id=JOB, run_id=None, scrub_id=f"scrub-{number}", shard_count=1, due_at=T0, passes_left=2
    )
    return msgspec.structs.replace(intent, **fields)


def a_crossing(job_id: JobId = JOB, **fields: Any) -> Crossing:
    crossing = Crossing(job_id=job_id, token="token-1", made_at=T0, writes="[]")
    return msgspec.structs.replace(crossing, **fields)


def an_event(number: int = 1, **fields: Any) -> Event:
    event = Event(
        caller=CALLER,
        event_id=EventId(f"event-{number}"),
        event_type=EventType.RUN_COMPLETED,
        occurred_at=T0,
        expires_at=T0 + 3600,
        data="{}",
    )
    return msgspec.structs.replace(event, **fields)


def a_feed(seq: int = 1, caller: CallerId = CALLER) -> EventSequence:
    return EventSequence(caller, seq)


def some_keys(caller: CallerId = CALLER, **fields: Any) -> SigningKeys:
    keys = SigningKeys(caller, SigningKey(a_ulid(7), T0, "v1.sealed"))
    return msgspec.structs.replace(keys, **fields)


def a_schedule(job_id: JobId = JOB, **fields: Any) -> Schedule:
    """Makes a schedule that fires every hour, counted from T0."""
    schedule = Schedule(
        job_id=job_id,
        status=ScheduleStatus.ACTIVE,
        rule=Rate(1, RateUnit.HOUR, T0),
        overlap=Overlap.SKIP,
        source=StagedList("sources/1/1/0", RunId(job_id), FIRST_BATCH),
        total=2,
        created_at=T0,
        updated_at=T0,
        next_fire_at=T0 + 3600,
    )
    return msgspec.structs.replace(schedule, **fields)


def an_export(number: int = 1, **fields: Any) -> Export:
    export = Export(
        job_id=JOB,
        run_id=RUN,
        export_id=ExportId(a_ulid(900 + number)),
        format=ExportFormat.ZIP,
        status=ExportStatus.PENDING,
        created_at=T0,
        updated_at=T0,
        expires_at=T0 + 43_200,
        due_at=T0,
        total=0,
    )
    return msgspec.structs.replace(export, **fields)


def an_input(number: int = 1, **fields: Any) -> JobInput:
    slot = JobInput(
        input_id=InputId(a_ulid(300 + number)),
        caller=CALLER,
        spec=ListSpec(ListFormat.TEXT),
        created_at=T0,
        expires_at=T0 + 3600,
    )
    return msgspec.structs.replace(slot, **fields)


def a_budget(run_id: RunId = RUN, **fields: Any) -> Budget:
    budget = Budget(job_id=JOB, run_id=run_id, unit=Unit.CREDITS, cap=100, left=100)
    return msgspec.structs.replace(budget, **fields)


def a_share(run_id: RunId = RUN, **fields: Any) -> BudgetReservation:
    share = BudgetReservation(job_id=JOB, run_id=run_id, holder="holder-1", taken=0, seq=1)
    return msgspec.structs.replace(share, **fields)


def a_sample(minute: int = 0, run_id: RunId = RUN, **fields: Any) -> CounterSample:
    sample = CounterSample(job_id=JOB, run_id=run_id, minute=minute, at=T0)
    return msgspec.structs.replace(sample, **fields)


def a_crawl(job_id: JobId = JOB, **fields: Any) -> Crawl:
    crawl = Crawl(
        job_id=job_id,
        run_id=RUN,
        caller=CALLER,
        status=CrawlStatus.RUNNING,
        url="https://example.com/",
        rules=CrawlRules(),
        created_at=T0,
        updated_at=T0,
        due_at=T0,
    )
    return msgspec.structs.replace(crawl, **fields)


def a_crawl_step(number: int = 0, run_id: RunId = RUN, **fields: Any) -> CrawlStep:
    entry = CrawlEntry(TaskId(f"{number:032x}"), 1, EntryKind.PAGE)
    step = CrawlStep(job_id=JOB, run_id=run_id, number=number, waiting=(entry,))
    return msgspec.structs.replace(step, **fields)


def a_ref(index: int = 0, run_id: RunId = RUN, job_id: JobId = JOB) -> TaskRef:
    return ref_to(a_task(index, run_id), job_id)


def ref_to(task: Task, job_id: JobId = JOB) -> TaskRef:
    return TaskRef(job_id, task.run_id, task.task_id, task.shard)


def key_of(row: R, job_id: JobId = JOB) -> Key[R]:
    """Returns the key of a row. A task row does not contain its job, so the caller may pass it."""
    kind = KIND_OF_ROW[Task if isinstance(row, Task) else type(row)]
    return kind.key_of(row, job_id)


def insert(row: Row, *, over_expired_at: float | None = None) -> Insert:
    return Insert(key_of(row), row, over_expired_at)


def update(row: Row, guard: Guard = ANY, **values: Any) -> Update:
    return Update(key_of(row), guard, values=values)


def add(row: Row, guard: Guard = ANY, **deltas: int) -> Update:
    return Update(key_of(row), guard, deltas=deltas)


def delete(row: Row, guard: Guard = ANY) -> Delete:
    return Delete(key_of(row), guard)


def a_change(*writes: Write, refs: tuple[TaskRef, ...] = ()) -> Change:
    return Change(writes, effects=(Enqueue(refs),) if refs else ())


async def kept(store: Store, row: Row) -> Row | None:
    """Returns the stored row that has the key of this row."""
    return cast("Row | None", await store.read(cast("Any", key_of(row))))


async def keep(store: Store, *rows: Row) -> None:
    """Inserts rows into a store, as the initial state of a test."""
    verdicts = await store.commit([a_change(insert(row)) for row in rows])
    assert all(isinstance(verdict, Applied) for verdict in verdicts), verdicts
