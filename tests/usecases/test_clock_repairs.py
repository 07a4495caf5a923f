"""The clock is set while claims, notices, lists, schedules and ids wait for a time (SPEC.md
4.22)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conveyor.domain import idempotency, ids, limits, timing
from conveyor.domain import webhook as webhooks
from conveyor.domain.changes import Applied, ScheduleKey
from conveyor.domain.idempotency import First, InProgress, Request
from conveyor.domain.ids import JobId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import DeliveryAttempt, RunStatus
from conveyor.domain.queries import DueExports, DueNotices, DueScrubs, JobsOf, RunsOf
from conveyor.domain.run.settlement import Claimed, HeldByOther
from conveyor.domain.schedule import Cron, Overlap, Rate, RateUnit, Rule, Schedule
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases import clock_repairs
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.run import reconcile, runs, tasks
from conveyor.usecases.submit.jobs import Submission
from tests.builders import (
    CALLER,
    ManualClock,
    a_deletion_intent,
    a_notice,
    a_record,
    an_export,
    keep,
)
from tests.usecases.world import LATER_FROM, run_of, submit, work

MINUTE_S, HOUR_S, DAY_S = 60.0, 3_600.0, 86_400.0
BACK_S = (-HOUR_S, -DAY_S, -40 * DAY_S)
STEPS_S = (*BACK_S, HOUR_S, DAY_S, 40 * DAY_S)
EVERY_MINUTE = Cron("* * * * *", "UTC")


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_a_run_continues_at_once_after_the_clock_was_set(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    accepted = await submit(env, 20)
    await work(env, accepted.run, count=5)

    clock.step(step_s)
    done = await work(env, accepted.run)

    assert done == 15
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_the_task_of_a_lost_worker_is_taken_over_when_its_message_returns(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(
        accepted.run.run_id, count_max=1, visibility_s=limits.VISIBILITY_S
    )
    await tasks.claim(env, [message.ref])

    clock.step(step_s)
    clock.advance(limits.CLAIM_TTL_S + 1)
    (again,) = await env.queue.receive(
        accepted.run.run_id, count_max=1, visibility_s=limits.VISIBILITY_S
    )
    (claim,) = await tasks.claim(env, [again.ref])

    assert isinstance(claim, Claimed)
    assert claim.task.claim == 2
    assert not timing.is_unreal(claim.task.claim_until, now=env.now(), ttl_s=limits.CLAIM_TTL_S)


async def test_a_claim_within_the_possible_clock_difference_is_kept(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    await tasks.claim(env, [message.ref])

    clock.step(-limits.CLOCK_SKEW_S)
    (claim,) = await tasks.claim(env, [message.ref])

    assert isinstance(claim, HeldByOther)


async def test_a_claim_from_the_future_is_taken_over_by_one_of_two_workers(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    await tasks.claim(env, [message.ref])
    clock.step(-DAY_S)

    claims = [(await tasks.claim(env, [message.ref]))[0] for _ in range(2)]

    assert [type(claim) for claim in claims] == [Claimed, HeldByOther]


@pytest.mark.parametrize("step_s", BACK_S)
async def test_a_list_that_a_lost_process_left_is_taken_over(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    await submit(env, LATER_FROM)

    clock.step(step_s)

    assert await reconcile.stalled_batches(env, idle_s=0) == []
    (batch,) = await clock_repairs.batches_from_ahead(env)
    await reconcile.finish_batch(env, batch)
    assert await clock_repairs.batches_from_ahead(env) == []


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("step_s", BACK_S)
async def test_a_new_job_is_the_first_of_the_list_after_a_step_back(
    env: Context, clock: ManualClock, step_s: float, is_restarted: bool
) -> None:
    await submit(env, 1)
    await submit(env, 1)

    clock.step(step_s)
    if is_restarted:
        env = replace(env, minter=ids.Minter())
        await clock_repairs.learn_newest_ids(env)
    later = [(await submit(env, 1)).job.job_id for _ in range(3)]

    query = JobsOf(caller=CALLER, statuses=JOB_VISIBLE, limit=3)
    assert [job.job_id for job in await env.store.find(query)] == later[::-1]
    assert all(map(ids.is_ulid, later))


async def _schedule_every(env: Context, rule: Rule) -> JobId:
    request = Submission(drafts=[TaskDraft(url="https://example.com/")])
    accepted = await schedules.submit(
        env, CALLER, request, rule, Overlap.SKIP, job_id=JobId(env.new_id())
    )
    return accepted.job.job_id


async def _row(env: Context, job_id: JobId) -> Schedule:
    schedule = await env.store.read(ScheduleKey(job_id))
    assert schedule is not None
    return schedule


@pytest.mark.parametrize("step_s", BACK_S)
async def test_a_schedule_fires_at_its_next_time_after_the_clock_was_ahead(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    """The clock was 40 days ahead, the schedule fired, and the clock was set back."""
    job_id = await _schedule_every(env, EVERY_MINUTE)
    clock.step(-step_s)
    await schedules.trigger_schedule(env, job_id)
    clock.step(step_s)

    await clock_repairs.realign_schedules(env)

    schedule = await _row(env, job_id)
    assert schedule.next_fire_at is not None
    assert schedule.last_fire_at is not None
    # The time of the first minute has already fired; the second has not.
    assert 0 < schedule.last_fire_at - env.now() <= MINUTE_S
    assert schedule.next_fire_at == schedule.last_fire_at + MINUTE_S


@pytest.mark.parametrize("step_s", BACK_S)
async def test_an_interval_that_was_set_while_the_clock_was_ahead_starts_now(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    rule = Rate(5, RateUnit.MINUTE, anchor_at=env.now())
    job_id = await _schedule_every(env, rule)

    clock.step(step_s)
    await clock_repairs.realign_schedules(env)

    next_fire_at = (await _row(env, job_id)).next_fire_at
    assert next_fire_at is not None
    assert 0 < next_fire_at - env.now() <= 5 * MINUTE_S


async def test_a_nominal_time_that_the_clock_passes_twice_fires_once(
    env: Context, clock: ManualClock
) -> None:
    job_id = await _schedule_every(env, EVERY_MINUTE)
    fired: list[float | None] = []
    for _ in range(2):
        for _ in range(10):
            clock.advance(MINUTE_S)
            await schedules.trigger_schedule(env, job_id)
            query = RunsOf(job_id=job_id, statuses=frozenset({RunStatus.RUNNING}), limit=9)
            for run in await env.store.find(query):
                fired.append(run.scheduled_for)
                await runs.stop(env, CALLER, job_id)
        clock.step(-5 * MINUTE_S)
        await clock_repairs.realign_schedules(env)

    assert len(fired) == len(set(fired)) == 15


async def test_a_consistent_schedule_is_not_realigned(env: Context) -> None:
    job_id = await _schedule_every(env, EVERY_MINUTE)
    before = await _row(env, job_id)

    assert await clock_repairs.realign_schedules(env) == 0
    assert await _row(env, job_id) == before


@pytest.mark.parametrize("step_s", BACK_S)
async def test_waiting_work_is_due_again_after_the_clock_was_set_back(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    await keep(
        env.store,
        a_notice(due_at=env.now() + 5),
        an_export(due_at=env.now() + limits.EXPORT_CLAIM_S, expires_at=env.now() + 12 * HOUR_S),
        a_deletion_intent(due_at=env.now() + limits.SECOND_DELETION_PASS_S, passes_left=1),
    )

    clock.step(step_s)
    await clock_repairs.pull_back(env)

    now = env.now()
    notices = DueNotices(statuses=webhooks.WAITING, due_by=now, limit=9)
    assert len(await env.store.find(notices)) == 1
    assert len(await env.store.find(DueExports(due_by=now, limit=9))) == 1
    assert len(await env.store.find(DueScrubs(due_by=now, limit=9))) == 1


async def test_work_that_waits_for_its_maximum_time_is_not_pulled_back(env: Context) -> None:
    now = env.now()
    told_to_wait = DeliveryAttempt(at=now, duration_s=0.1, status=429)
    await keep(
        env.store,
        a_notice(1, due_at=now + webhooks.POSTPONE_S_MAX),
        a_notice(2, due_at=now + webhooks.RETRY_AFTER_S_MAX, tries=(told_to_wait,)),
        an_export(due_at=now + limits.EXPORT_CLAIM_S, expires_at=now + 12 * HOUR_S),
        a_deletion_intent(1, due_at=now + limits.SECOND_DELETION_PASS_S, passes_left=1),
        a_deletion_intent(2, due_at=now + limits.TOMBSTONE_TTL_S, passes_left=0),
    )

    assert await clock_repairs.pull_back(env) == 0


@pytest.mark.parametrize("step_s", BACK_S)
def test_a_key_whose_owner_was_lost_can_be_used_after_the_clock_was_set_back(step_s: float) -> None:
    clock = ManualClock()
    record = a_record(claimed_until=clock.now() + limits.IDEMPOTENCY_CLAIM_S)
    request = Request(CALLER, "POST", "/v1/jobs", "key", record.fingerprint)
    assert isinstance(idempotency.decide(record, request, now=clock.now()), InProgress)

    clock.step(step_s)

    assert isinstance(idempotency.decide(record, request, now=clock.now()), First)


async def test_a_key_claim_from_the_future_is_taken_over_by_one_of_two_requests(
    env: Context, clock: ManualClock
) -> None:
    request = Request(CALLER, "POST", "/v1/jobs", "key", "fingerprint")
    record = a_record(
        request.key_id,
        fingerprint=request.fingerprint,
        claimed_until=clock.now() + limits.IDEMPOTENCY_CLAIM_S,
        expires_at=clock.now() + limits.IDEMPOTENCY_TTL_S,
    )
    await keep(env.store, record)
    clock.step(-DAY_S)
    change = idempotency.claim_key(
        request, record, subject="subject", owner="other", now=clock.now()
    )

    verdicts = [await env.commit(change) for _ in range(2)]

    assert [isinstance(verdict, Applied) for verdict in verdicts] == [True, False]
