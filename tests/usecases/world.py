"""The ports of a memory engine with a manual clock, and a worker small enough for one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import make_problem
from conveyor.domain.ids import BatchId, CallerId, JobId, RunId
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import (
    CounterState,
    FailureReason,
    Job,
    Run,
    Task,
    TaskRef,
    TaskStatus,
    Totals,
)
from conveyor.domain.queries import StatsOf, TasksOf
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import AlreadyDone, Claimed, Settled
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.memory import MemoryEngine, memory_engine
from conveyor.engines.system import AesSecretBox
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.errors import QueueGone
from conveyor.ports.gateway import NotScraped, Outcome, Scraped
from conveyor.ports.queue import Message
from conveyor.usecases.context import Context, RuntimeConfig
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import results, runs, tasks
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted, Submission
from tests.builders import CALLER, ManualClock

PAGE = Scraped(status=200, content_type="text/html", body=b"<html>")
MISS = NotScraped(
    reason=FailureReason.BLOCKED,
    problem=make_problem("blocked", "Blocked", 403),
    retryable=False,
)
LATER_FROM = 300
"""Lists of this size are ingested after the answer: small enough for a quick test."""


@dataclass(slots=True)
class SignalLog:
    """Records the signals that are sent, without workers to receive them."""

    said: list[tuple[str, RunId]] = field(default_factory=list)

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        self.said.append(("run_changed", run_id))

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        self.said.append(("batch_opened", run_id))

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        self.said.append(("teardown", run_id))
        return TeardownResult()


@dataclass(slots=True, kw_only=True)
class World:
    clock: ManualClock
    engine: MemoryEngine
    signals: SignalLog
    env: Context


def a_world(*, shard_count: int = 4) -> World:
    clock = ManualClock()
    engine = memory_engine(clock=clock, random=Random(1))
    signals = SignalLog()
    env = Context(
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
        secret_box=AesSecretBox(b"k" * 32),
        signals=signals,
        random=Random(2),
        process_id="process-1",
        config=RuntimeConfig(
            sync_tasks_max=LATER_FROM, shard_count=shard_count, targets=TargetPolicy()
        ),
    )
    return World(clock=clock, engine=engine, signals=signals, env=env)


def with_config(env: Context, **numbers: int) -> Context:
    """The same ports with other limits."""
    return replace(env, config=replace(env.config, **numbers))  # type: ignore[arg-type]


def some_drafts(count: int, prefix: str = "p") -> list[TaskDraft]:
    return [TaskDraft(url=f"https://example.com/{prefix}{index}") for index in range(count)]


async def submit(
    env: Context, count: int, *, job_id: JobId | None = None, **fields: object
) -> Accepted:
    request = Submission(drafts=some_drafts(count), **fields)  # type: ignore[arg-type]
    return await jobs.submit(env, CALLER, request, job_id=job_id or JobId(env.new_id()))


async def add(
    env: Context, job: Job, count: int, *, batch: str = "b", is_last: bool = False
) -> Accepted:
    return await jobs.add_tasks(
        env,
        CALLER,
        job.job_id,
        some_drafts(count, batch),
        is_last=is_last,
        batch_id=BatchId(batch),
    )


async def run_of(env: Context, run: Run) -> Run:
    """Reads the current row of the run."""
    current = await env.store.read(RunKey(run.job_id, run.run_id))
    assert current is not None
    return current


async def rows_of(env: Context, run: Run) -> list[Task]:
    query = TasksOf(
        job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=1_000_000
    )
    return await env.store.find(query)


async def body_of(env: Context, run: Run, task_id: str) -> bytes:
    task, _ = await results.ended_task(env, run, task_id)
    assert task.result is not None
    return b"".join([piece async for piece in await results.body_of(env, task.result)])


def a_page(_: Task) -> Outcome:
    return PAGE


def missing(indexes: Iterable[int]) -> Callable[[Task], Outcome]:
    """Every page is found except those of the tasks with these indexes."""
    absent = frozenset(indexes)
    return lambda task: MISS if task.index in absent else PAGE


async def work(
    env: Context, run: Run, outcome: Callable[[Task], Outcome] = a_page, *, count: int = 10**6
) -> int:
    """Receives up to `count` messages of the run and settles each task; returns how many were
    received."""
    try:
        messages = await env.queue.receive(run.run_id, count_max=count, visibility_s=60)
    except QueueGone:
        return 0
    job = await _job_of(env, run)
    for message in messages:
        await _process(env, job, message, outcome)
    return len(messages)


async def _job_of(env: Context, run: Run) -> Job:
    job = await env.store.read(JobKey(run.job_id))
    assert job is not None
    return job


async def _process(
    env: Context, job: Job, message: Message, outcome: Callable[[Task], Outcome]
) -> None:
    ref = message.ref
    claim = (await tasks.claim(env, [ref]))[0]
    if isinstance(claim, AlreadyDone):
        await _complete_and_ack(env, message)
        return
    if not isinstance(claim, Claimed):
        return
    change = await _judge(env, job, ref, claim.task, outcome(claim.task))
    verdict = settlement.settle_result(await env.commit(change.change), claim.task)
    if not isinstance(verdict, Settled):
        return
    if isinstance(change, tasks.Retry):
        await env.queue.bounce((message,), delay_s=change.delay_s)
    else:
        await _complete_and_ack(env, message)


async def _judge(
    env: Context, job: Job, ref: TaskRef, task: Task, outcome: Outcome
) -> tasks.Finish | tasks.Retry:
    if isinstance(outcome, NotScraped):
        return tasks.judge_failure(env, job, ref, task, outcome)
    assert isinstance(outcome, Scraped), "these tests defer nothing"
    result = await tasks.store_body(env, ref, Claimed(task), outcome)
    return tasks.judge_success(env, ref, task, outcome, result)


async def _complete_and_ack(env: Context, message: Message) -> None:
    await runs.complete_if_done(env, message.ref.job_id, message.ref.run_id)
    await env.queue.ack((message,))


async def check_counters(env: Context, run: Run) -> Totals:
    """Asserts that the counters of every shard match its rows."""
    rows = await rows_of(env, run)
    query = StatsOf(job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count)
    for stats in await env.store.find(query):
        mine = [row for row in rows if row.shard == stats.shard]
        assert stats.admitted == len(mine)
        assert stats.done == sum(row.status in TASK_TERMINAL for row in mine)
        assert stats.successful == sum(row.status is TaskStatus.SUCCESSFUL for row in mine)
        assert stats.failed == sum(row.status is TaskStatus.FAILED for row in mine)
        for reason in FailureReason:
            count = sum(row.reason is reason for row in mine if row.status is TaskStatus.FAILED)
            assert getattr(stats, reason.value) == count
        waiting = [row for row in mine if row.status is TaskStatus.PENDING and row.attempts]
        assert stats.retrying == len(waiting)
    return await totals_of(env, run)


async def gates_of(env: Context, run: Run) -> set[CounterState]:
    query = StatsOf(job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count)
    return {stats.status for stats in await env.store.find(query)}


def urls_of(rows: Sequence[Task]) -> list[str]:
    return sorted(row.url for row in rows)


OTHER_CALLER = CallerId("caller-b")
