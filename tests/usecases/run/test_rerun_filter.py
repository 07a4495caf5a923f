"""Rerun filters by failure reason and by host, for small and large lists."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain.errors import Conflict, make_problem
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import FailureReason, Job, Run, Task, TaskStatus
from conveyor.domain.submit.admission import TaskDraft
from conveyor.ports.gateway import NotScraped, Outcome
from conveyor.usecases.context import Context
from conveyor.usecases.run import rerun, runs
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Submission
from tests.builders import CALLER
from tests.usecases.run.test_rerun import FAILED, SIZES, ingest_open, start_rerun
from tests.usecases.world import LATER_FROM, PAGE, check_counters, rows_of, run_of, work

BLOCKED, TIMEOUT = FailureReason.BLOCKED, FailureReason.TIMEOUT


async def a_mixed_job(env: Context, count: int) -> tuple[Job, Run]:
    """Tasks of two alternating hosts; of the first six tasks three were blocked and three timed
    out."""
    drafts = [TaskDraft(url=f"https://{'ab'[index % 2]}.example/{index}") for index in range(count)]
    accepted = await jobs.submit(
        env, CALLER, Submission(drafts=drafts, max_attempts=1), job_id=JobId(env.new_id())
    )
    await ingest_open(env, accepted.run)

    def outcome(task: Task) -> Outcome:
        if task.index >= 6:
            return PAGE
        reason = BLOCKED if task.index < 3 else TIMEOUT
        problem = make_problem(reason, "Missed", 502)
        return NotScraped(reason=reason, problem=problem, retryable=False)

    await work(env, accepted.run, outcome)
    return accepted.job, await run_of(env, accepted.run)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    ("choice", "indexes"),
    [
        ({"reasons": {BLOCKED}}, {0, 1, 2}),
        ({"reasons": {BLOCKED, TIMEOUT}, "retry": FAILED}, {0, 1, 2, 3, 4, 5}),
        ({"hosts": {"b.example"}, "retry": FAILED}, {1, 3, 5}),
        ({"hosts": {"a.example"}, "reasons": {TIMEOUT}}, {4}),
    ],
)
async def test_a_rerun_can_be_filtered_by_reason_and_by_host(
    env: Context, count: int, choice: dict[str, Any], indexes: set[int]
) -> None:
    job, _ = await a_mixed_job(env, max(count, 6))

    second = await rerun.rerun(env, CALLER, job.job_id, run_id=RunId(env.new_id()), **choice)
    await ingest_open(env, second.run)

    rows = await rows_of(env, second.run)
    assert {row.index for row in rows if row.source_run_id is None} == indexes
    assert (second.retried, second.inherited) == (len(indexes), len(rows) - len(indexes))
    await check_counters(env, second.run)


async def test_a_filter_by_host_alone_retries_its_tasks_whatever_their_outcome(
    env: Context,
) -> None:
    job, _ = await a_mixed_job(env, 10)

    second = await rerun.rerun(
        env, CALLER, job.job_id, run_id=RunId(env.new_id()), hosts=frozenset({"a.example"})
    )

    assert second.retried == 5


@pytest.mark.parametrize(
    "choice",
    [
        {"reasons": {FailureReason.OTHER}},
        {"reasons": {BLOCKED}, "retry": {TaskStatus.SUCCESSFUL}},
        {"hosts": {"c.example"}},
        {"hosts": {"example"}},
    ],
)
async def test_an_empty_or_unknown_filter_is_refused(env: Context, choice: dict[str, Any]) -> None:
    job, _ = await a_mixed_job(env, 10)

    with pytest.raises(Conflict) as refused:
        await rerun.rerun(env, CALLER, job.job_id, run_id=RunId(env.new_id()), **choice)

    assert refused.value.code == "no_matching_tasks"


async def test_a_full_rerun_ignores_the_host_filter_of_a_rerun_that_was_stopped(
    env: Context,
) -> None:
    job, _ = await a_mixed_job(env, LATER_FROM)
    second = await rerun.rerun(
        env, CALLER, job.job_id, run_id=RunId(env.new_id()), hosts=frozenset({"a.example"})
    )
    await runs.stop(env, CALLER, job.job_id)
    assert second.is_later

    third = await start_rerun(env, job)
    await ingest_open(env, third.run)

    assert third.retried == LATER_FROM
    assert {row.status for row in await rows_of(env, third.run)} == {TaskStatus.PENDING}
