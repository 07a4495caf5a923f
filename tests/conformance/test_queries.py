"""The laws of Store.find: what each query filters, in which order, up to which limit
(docs/storage.md, Queries)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.changes import Applied
from conveyor.domain.ids import BatchId, CallerId, JobId, RunId, TaskId
from conveyor.domain.model import (
    BatchStatus,
    JobStatus,
    JobType,
    NoticeStatus,
    RunStatus,
    Task,
    TaskStatus,
)
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
    JobsOf,
    NoticesOf,
    RunsIn,
    RunsOf,
    SamplesOf,
    StatsOf,
    TasksAt,
    TasksOf,
    UnfinishedCrossings,
)
from conveyor.domain.schedule import ScheduleStatus
from conveyor.ports.store import Store
from tests.builders import (
    CALLER,
    JOB,
    OTHER_JOB,
    OTHER_RUN,
    RUN,
    T0,
    ManualClock,
    a_batch,
    a_change,
    a_crawl,
    a_crawl_step,
    a_crossing,
    a_deletion_intent,
    a_job,
    a_notice,
    a_run,
    a_sample,
    a_schedule,
    a_stats,
    a_task,
    a_ulid,
    an_export,
    insert,
    keep,
    ref_to,
    update,
)
from tests.conformance.engines import ENGINES, fresh_engine

OPEN = frozenset({JobStatus.OPEN})
RUNNING = frozenset({RunStatus.RUNNING})


def _tasks_of(limit: int = 100, **fields: object) -> TasksOf:
    return TasksOf(job_id=JOB, run_id=RUN, shard_count=4, limit=limit, **fields)  # type: ignore[arg-type]


async def _pages(store: Store, statuses: frozenset[TaskStatus] | None, limit: int) -> list[Task]:
    """Returns all tasks, page by page; each page starts after the last id of the one before."""
    matches: list[Task] = []
    after: TaskId | None = None
    while page := await store.find(_tasks_of(limit, statuses=statuses, after=after)):
        assert len(page) <= limit
        matches += page
        after = page[-1].task_id
    return matches


async def test_tasks_of_a_run_are_found_in_id_order_across_shards(store: Store) -> None:
    tasks = [a_task(index, shard=index % 4) for index in range(12)]
    await keep(store, *tasks, a_task(0, OTHER_RUN))

    matches = await store.find(_tasks_of())

    assert matches == sorted(tasks, key=lambda task: task.task_id)


async def test_tasks_of_a_run_can_be_filtered_by_status(store: Store) -> None:
    tasks = [a_task(index, status=status) for index, status in enumerate(TaskStatus)]
    await keep(store, *tasks)
    expected_statuses = frozenset({TaskStatus.FAILED, TaskStatus.PROCESSING})

    matches = await store.find(_tasks_of(statuses=expected_statuses))
    none = await store.find(_tasks_of(statuses=frozenset()))

    assert {task.status for task in matches} == expected_statuses
    assert len(matches) == 2
    assert none == []


async def test_a_page_of_tasks_can_start_after_an_id_that_does_not_exist(store: Store) -> None:
    tasks = [a_task(index, task_id=TaskId(f"task-{index}")) for index in range(5)]
    await keep(store, *tasks)

    behind_one = await store.find(_tasks_of(2, after=TaskId("task-1")))
    behind_none = await store.find(_tasks_of(after=TaskId("task-3-and-a-half")))

    assert behind_one == tasks[2:4]
    assert behind_none == tasks[4:]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=15, deadline=None)
@given(
    statuses=st.lists(st.sampled_from(TaskStatus), max_size=24),
    expected_statuses=st.none() | st.frozensets(st.sampled_from(TaskStatus), min_size=1),
    limit=st.integers(1, 30),
)
async def test_paging_yields_each_task_exactly_once_for_any_page_size(
    name: str,
    statuses: list[TaskStatus],
    expected_statuses: frozenset[TaskStatus] | None,
    limit: int,
) -> None:
    tasks = [a_task(index, status=status, shard=index % 4) for index, status in enumerate(statuses)]
    async with fresh_engine(name, ManualClock()) as engine:
        await keep(engine.store, *tasks)

        matches = await _pages(engine.store, expected_statuses, limit)

    expected = [
        task for task in tasks if expected_statuses is None or task.status in expected_statuses
    ]
    assert matches == sorted(expected, key=lambda task: task.task_id)


async def test_tasks_are_found_by_reference_and_missing_ones_are_left_out(
    store: Store,
) -> None:
    here, there = a_task(task_id=TaskId("a"), shard=1), a_task(task_id=TaskId("b"), shard=3)
    other = a_task(task_id=TaskId("c"), run_id=OTHER_RUN)
    await keep(store, a_job(), a_run(), here, there, other)
    refs = [ref_to(task) for task in (there, a_task(task_id=TaskId("missing")), here, there)]

    rows = await store.find(TasksAt(refs=tuple(refs)))

    assert sorted(rows, key=lambda row: row.task_id) == [here, there]


async def test_a_task_found_by_reference_is_as_last_written(store: Store) -> None:
    task = a_task()
    await keep(store, a_job(), a_run(), task)
    await store.commit([a_change(update(task, attempts=3))])

    (row,) = await store.find(TasksAt(refs=(ref_to(task),)))

    assert row.attempts == 3


async def test_a_query_sees_what_was_committed_before_it(store: Store) -> None:
    await keep(store, a_task(), a_run())

    [verdict] = await store.commit(
        [
            a_change(
                update(a_task(), status=TaskStatus.PROCESSING),
                update(a_run(), status=RunStatus.STOPPED),
                insert(a_task(1)),
            )
        ]
    )

    assert isinstance(verdict, Applied)
    assert await store.find(_tasks_of(statuses=frozenset({TaskStatus.PENDING}))) == [a_task(1)]
    assert await store.find(RunsIn(statuses=RUNNING, limit=10)) == []


async def test_the_counters_of_a_run_are_found_by_shard(store: Store) -> None:
    rows = [a_stats(shard, done=shard) for shard in (11, 2, 0, 1, 10)]
    await keep(store, *rows, a_stats(0, OTHER_RUN), a_stats(3, RunId("r"), job_id=OTHER_JOB))

    matches = await store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=12))

    assert matches == sorted(rows, key=lambda row: row.shard)


async def test_jobs_of_a_caller_are_found_newest_first(store: Store) -> None:
    jobs = [a_job(JobId(a_ulid(number)), created_at=T0 + number) for number in (3, 1, 2)]
    await keep(store, *jobs, a_job(JobId(a_ulid(9)), caller=CallerId("caller-b")))

    matches = await store.find(JobsOf(caller=CALLER, statuses=OPEN, limit=10))

    assert [job.job_id for job in matches] == [a_ulid(3), a_ulid(2), a_ulid(1)]


async def test_unfinished_crossings_are_found_oldest_first(store: Store) -> None:
    left = [a_crossing(JobId(a_ulid(9 - n)), made_at=T0 + n) for n in range(4)]
    await keep(store, *reversed(left))

    matches = await store.find(UnfinishedCrossings(limit=10))
    first = await store.find(UnfinishedCrossings(limit=2))

    assert matches == left
    assert first == left[:2]


async def test_jobs_of_a_caller_can_be_filtered_and_paged(store: Store) -> None:
    jobs = [
        a_job(JobId(a_ulid(1)), external_id="mine"),
        a_job(JobId(a_ulid(2)), external_id="mine", status=JobStatus.CLOSED),
        a_job(JobId(a_ulid(3)), external_id="mine"),
        a_job(JobId(a_ulid(4)), external_id="yours"),
        a_job(JobId(a_ulid(5)), external_id="mine", status=JobStatus.DELETED),
    ]
    await keep(store, *jobs)
    visible = frozenset({JobStatus.OPEN, JobStatus.CLOSED})

    mine = JobsOf(caller=CALLER, statuses=visible, external_id="mine", limit=10)
    before = JobsOf(caller=CALLER, statuses=visible, before=JobId(a_ulid(4)), limit=2)

    assert [job.job_id for job in await store.find(mine)] == [a_ulid(3), a_ulid(2), a_ulid(1)]
    assert [job.job_id for job in await store.find(before)] == [a_ulid(3), a_ulid(2)]


async def test_runs_of_a_job_are_found_newest_first(store: Store) -> None:
    runs = [a_run(RunId(a_ulid(90 - number)), sequence=number) for number in (1, 10, 2, 9)]
    await keep(store, *runs, a_run(RunId(a_ulid(99)), job_id=OTHER_JOB, sequence=5))

    matches = await store.find(RunsOf(job_id=JOB, statuses=RUNNING, limit=10))

    assert [run.sequence for run in matches] == [10, 9, 2, 1]


async def test_runs_of_a_job_can_be_filtered_and_paged(store: Store) -> None:
    statuses = list(RunStatus)
    runs = [
        a_run(RunId(a_ulid(number)), sequence=number, status=statuses[number % 2])
        for number in range(1, 9)
    ]
    await keep(store, *runs)

    query = RunsOf(job_id=JOB, statuses=frozenset(statuses[:1]), before=6, limit=1)
    everything = RunsOf(job_id=JOB, statuses=frozenset(statuses), before=3, limit=10)

    assert [run.sequence for run in await store.find(query)] == [4]
    assert [run.sequence for run in await store.find(everything)] == [2, 1]


async def test_batches_of_a_run_are_found_oldest_first(store: Store) -> None:
    batches = [
        a_batch(batch_id=BatchId("c"), created_at=T0 + 1, status=BatchStatus.SEALED),
        a_batch(batch_id=BatchId("b"), created_at=T0 + 2),
        a_batch(batch_id=BatchId("a"), created_at=T0 + 3, updated_at=T0),
    ]
    foreign = [a_batch(OTHER_RUN), a_batch(RunId("r"), job_id=OTHER_JOB)]
    await keep(store, *reversed(batches), *foreign)

    assert await store.find(BatchesOf(job_id=JOB, run_id=RUN)) == batches


async def test_samples_of_a_run_are_found_oldest_first(store: Store) -> None:
    samples = [a_sample(minute, at=T0 + minute) for minute in (9, 10, 200)]
    foreign = [a_sample(9, OTHER_RUN), a_sample(9, RunId("r"), job_id=OTHER_JOB)]
    await keep(store, *reversed(samples), *foreign)

    assert await store.find(SamplesOf(job_id=JOB, run_id=RUN, limit=10)) == samples
    assert await store.find(SamplesOf(job_id=JOB, run_id=RUN, limit=2)) == samples[:2]


async def test_rows_of_a_run_are_found_under_its_own_job_only(store: Store) -> None:
    await keep(store, a_stats(), a_batch(), a_run())

    assert await store.find(StatsOf(job_id=OTHER_JOB, run_id=RUN, shard_count=1)) == []
    assert await store.find(BatchesOf(job_id=OTHER_JOB, run_id=RUN)) == []
    assert await store.find(RunsOf(job_id=OTHER_JOB, statuses=RUNNING, limit=10)) == []


async def test_runs_by_status_are_found_in_id_order_across_callers(store: Store) -> None:
    runs = [
        a_run(RunId(a_ulid(number)), job_id=JobId(a_ulid(9 - number)), caller=CallerId(f"{number}"))
        for number in range(4)
    ]
    await keep(store, *reversed(runs), a_run(status=RunStatus.COMPLETED))

    matches = await store.find(RunsIn(statuses=RUNNING, limit=3))
    rest = await store.find(RunsIn(statuses=RUNNING, after=matches[-1].run_id, limit=3))
    ended = await store.find(RunsIn(statuses=frozenset({RunStatus.COMPLETED}), limit=3))

    assert matches + rest == runs
    assert [run.run_id for run in ended] == [RUN]


async def test_runs_changed_since_an_instant_include_those_changed_at_it(store: Store) -> None:
    runs = [a_run(RunId(a_ulid(number)), updated_at=T0 + number) for number in range(4)]
    await keep(store, *runs)

    matches = await store.find(RunsIn(statuses=RUNNING, updated_since=T0 + 2, limit=10))

    assert matches == runs[2:]


async def test_idle_batches_by_status_are_found_longest_idle_first(
    store: Store,
) -> None:
    idle = [
        a_batch(RunId(a_ulid(9 - number)), updated_at=T0 + number, created_at=T0 - number)
        for number in range(4)
    ]
    sealed = a_batch(status=BatchStatus.SEALED)
    await keep(store, *reversed(idle), sealed)
    is_open = frozenset({BatchStatus.OPEN})

    matches = await store.find(BatchesIn(statuses=is_open, idle_since=T0 + 2, limit=10))
    first = await store.find(BatchesIn(statuses=is_open, idle_since=T0 + 2, limit=1))

    assert matches == idle[:3]
    assert first == idle[:1]


async def test_due_notices_by_status_are_found_oldest_first(store: Store) -> None:
    due = [a_notice(9 - number, due_at=T0 + number) for number in range(4)]
    delivered = a_notice(100, status=NoticeStatus.DELIVERED)
    await keep(store, *reversed(due), delivered)
    waiting = frozenset({NoticeStatus.DUE})

    matches = await store.find(DueNotices(statuses=waiting, due_by=T0 + 2, limit=10))
    first = await store.find(DueNotices(statuses=waiting, due_by=T0 + 2, limit=2))

    assert matches == due[:3]
    assert first == due[:2]


async def test_notices_of_a_job_are_found_newest_run_first_and_newest_first_within_a_run(
    store: Store,
) -> None:
    mine = [
        a_notice(3, run_id=OTHER_RUN, occurred_at=T0),
        a_notice(5, occurred_at=T0 + 2),
        a_notice(4, occurred_at=T0 + 1.5),
        a_notice(1, occurred_at=T0 + 1.5),
    ]
    await keep(store, *mine[::-1], a_notice(2, job_id=OTHER_JOB))

    matches = await store.find(NoticesOf(job_id=JOB, limit=10))
    of_run = await store.find(NoticesOf(job_id=JOB, run_id=RUN, limit=2))
    last = of_run[-1]
    before = (last.run_id, last.occurred_at, last.notice_id)
    rest = await store.find(NoticesOf(job_id=JOB, run_id=RUN, before=before, limit=10))

    assert matches == mine
    assert of_run + rest == mine[1:]


async def test_due_deletion_intents_are_found_oldest_first(store: Store) -> None:
    due = [a_deletion_intent(9 - number, due_at=T0 + number) for number in range(4)]
    await keep(store, *reversed(due))

    matches = await store.find(DueScrubs(due_by=T0 + 2, limit=10))
    first = await store.find(DueScrubs(due_by=T0 + 2, limit=2))

    assert matches == due[:3]
    assert first == due[:2]


async def test_jobs_of_a_caller_can_be_filtered_by_type(store: Store) -> None:
    regular, scheduled = a_job(), a_job(OTHER_JOB, type=JobType.SCHEDULED)
    await keep(store, regular, scheduled)

    for kind, matches in [(JobType.REGULAR, [regular]), (JobType.SCHEDULED, [scheduled])]:
        query = JobsOf(caller=CALLER, statuses=OPEN, type=kind, limit=10)
        assert await store.find(query) == matches


async def test_due_schedules_by_status_are_found_soonest_first(
    store: Store,
) -> None:
    due = [a_schedule(JobId(a_ulid(9 - n)), next_fire_at=T0 + n) for n in range(4)]
    paused = a_schedule(JobId(a_ulid(50)), next_fire_at=T0, status=ScheduleStatus.PAUSED)
    over = a_schedule(JobId(a_ulid(51)), next_fire_at=None)
    await keep(store, *reversed(due), paused, over)
    active = frozenset({ScheduleStatus.ACTIVE})

    matches = await store.find(DueSchedules(statuses=active, due_by=T0 + 2, limit=10))
    first = await store.find(DueSchedules(statuses=active, due_by=T0 + 2, limit=2))

    assert matches == due[:3]
    assert first == due[:2]


async def test_due_exports_are_found_oldest_first(store: Store) -> None:
    due = [an_export(9 - number, due_at=T0 + number) for number in range(4)]
    await keep(store, *reversed(due))

    matches = await store.find(DueExports(due_by=T0 + 2, limit=10))
    first = await store.find(DueExports(due_by=T0 + 2, limit=2))

    assert matches == due[:3]
    assert first == due[:2]


async def test_due_crawls_are_found_oldest_first_and_ended_ones_are_not(
    store: Store,
) -> None:
    due = [a_crawl(JobId(a_ulid(9 - number)), due_at=T0 + number) for number in range(4)]
    ended = a_crawl(JobId(a_ulid(20)), due_at=None)
    await keep(store, ended, *reversed(due))

    matches = await store.find(DueCrawls(due_by=T0 + 2, limit=10))
    first = await store.find(DueCrawls(due_by=T0 + 2, limit=2))

    assert matches == due[:3]
    assert first == due[:2]


async def test_steps_of_a_crawl_are_found_in_order_from_a_number_on(store: Store) -> None:
    steps = [a_crawl_step(number) for number in (0, 9, 10, 200)]
    await keep(store, *reversed(steps), a_crawl_step(10, OTHER_RUN))

    matches = await store.find(CrawlStepsOf(job_id=JOB, run_id=RUN, first=9, limit=10))
    first = await store.find(CrawlStepsOf(job_id=JOB, run_id=RUN, first=9, limit=1))

    assert matches == steps[1:]
    assert first == steps[1:2]


async def test_pages_of_due_schedules_continue_after_a_time_and_a_job(store: Store) -> None:
    same_time = [a_schedule(JobId(a_ulid(n)), next_fire_at=T0) for n in range(3)]
    later = a_schedule(JobId(a_ulid(0) + "x"), next_fire_at=T0 + 1)
    await keep(store, later, *same_time)

    after = (T0, same_time[0].job_id)
    query = DueSchedules(statuses=frozenset(ScheduleStatus), due_by=T0 + 9, after=after, limit=10)

    assert await store.find(query) == [*same_time[1:], later]


async def test_runs_with_a_due_body_deletion_are_found_oldest_first_and_no_others(
    store: Store,
) -> None:
    due = [a_run(RunId(a_ulid(9 - number)), sweep_at=T0 + number) for number in range(4)]
    await keep(store, *reversed(due), a_run(), a_run(OTHER_RUN, expires_at=T0))

    matches = await store.find(DueExpiries(due_by=T0 + 2, limit=10))
    first = await store.find(DueExpiries(due_by=T0 + 2, limit=2))

    assert matches == due[:3]
    assert first == due[:2]


async def test_every_query_finds_nothing_in_an_empty_store(store: Store) -> None:
    assert await store.find(_tasks_of()) == []
    assert await store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=4)) == []
    assert await store.find(JobsOf(caller=CALLER, statuses=OPEN, limit=1)) == []
    assert await store.find(RunsOf(job_id=JOB, statuses=RUNNING, limit=1)) == []
    assert await store.find(BatchesOf(job_id=JOB, run_id=RUN)) == []
    assert await store.find(RunsIn(statuses=RUNNING, limit=1)) == []
    assert await store.find(NoticesOf(job_id=JOB, limit=1)) == []
    assert await store.find(DueScrubs(due_by=T0, limit=1)) == []
