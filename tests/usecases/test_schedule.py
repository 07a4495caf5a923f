"""Scheduled jobs: each nominal time creates one run or is skipped with a reason."""

from __future__ import annotations

import pytest

from conveyor.domain.changes import JobKey, RunKey, ScheduleKey
from conveyor.domain.errors import Conflict, InvalidArgument, NotFound
from conveyor.domain.ids import JobId, RunId, fire_id
from conveyor.domain.model import JobStatus, JobType, PauseState, RunStatus, TaskStatus
from conveyor.domain.schedule import (
    At,
    Overlap,
    Rate,
    RateUnit,
    ScheduleStatus,
    Skip,
    SkipReason,
)
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.run import rerun, runs
from conveyor.usecases.schedule import Fired
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, T0, ManualClock, a_ulid
from tests.usecases.run.test_rerun import ingest_open, start_rerun
from tests.usecases.scheduled import (
    DAILY,
    HOUR,
    HOURLY,
    finish,
    finish_latest,
    row_of,
    runs_of,
    schedule,
)
from tests.usecases.world import (
    OTHER_CALLER,
    SignalLog,
    add,
    check_counters,
    missing,
    rows_of,
    submit,
    work,
)


async def test_a_scheduled_job_has_no_run_until_it_fires(env: Context) -> None:
    job = await schedule(env)

    row = await row_of(env, job)
    assert (job.type, job.status) == (JobType.SCHEDULED, JobStatus.CLOSED)
    assert await runs_of(env, job) == []
    assert (row.next_fire_at, row.total) == (T0 + HOUR, 3)
    assert await schedules.trigger_schedule(env, job.job_id) is Fired.NOT_DUE


@pytest.mark.parametrize("count", [1, 120, 1_500])
async def test_each_nominal_time_makes_a_run_over_the_whole_list(
    env: Context, clock: ManualClock, count: int
) -> None:
    job = await schedule(env, count=count)

    for number in (1, 2):
        clock.at = T0 + number * HOUR + 0.5
        assert await schedules.trigger_schedule(env, job.job_id) is Fired.STARTED
        run = await finish_latest(env, job)
        assert (run.status, run.total, run.sequence) == (RunStatus.COMPLETED, count, number)
        assert run.scheduled_for == T0 + number * HOUR
        assert run.run_id == fire_id(job.job_id, T0 + number * HOUR)
        await check_counters(env, run)

    first, second = await runs_of(env, job)
    ids = [{row.task_id for row in await rows_of(env, run)} for run in (first, second)]
    assert ids[0] == ids[1]
    assert (await row_of(env, job)).next_fire_at == T0 + 3 * HOUR


async def test_a_fire_signals_ingest_and_fetching(
    env: Context, clock: ManualClock, signals: SignalLog
) -> None:
    job = await schedule(env)
    clock.advance(HOUR)

    await schedules.trigger_schedule(env, job.job_id)

    run_id = fire_id(job.job_id, T0 + HOUR)
    assert signals.said == [("batch_opened", run_id), ("run_changed", run_id)]


async def test_one_run_makes_up_for_all_missed_times(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.at = T0 + 72.5 * HOUR

    fired = [await schedules.trigger_schedule(env, job.job_id) for _ in range(3)]

    (run,) = await runs_of(env, job)
    row = await row_of(env, job)
    assert fired == [Fired.STARTED, Fired.NOT_DUE, Fired.NOT_DUE]
    assert run.scheduled_for == T0 + HOUR
    assert row.next_fire_at == T0 + 73 * HOUR
    assert row.skips == (Skip(T0 + 2 * HOUR, clock.at, SkipReason.MISSED),)


async def test_a_fire_is_skipped_while_a_run_is_live(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.at = T0 + HOUR
    await schedules.trigger_schedule(env, job.job_id)
    clock.at = T0 + 2 * HOUR

    fired = await schedules.trigger_schedule(env, job.job_id)

    row = await row_of(env, job)
    assert fired is Fired.PASSED
    assert len(await runs_of(env, job)) == 1
    assert row.next_fire_at == T0 + 3 * HOUR
    assert row.last_fire_at == T0 + HOUR
    assert row.skips == (Skip(T0 + 2 * HOUR, T0 + 2 * HOUR, SkipReason.OVERLAP),)


async def test_a_queued_fire_waits_for_the_live_run_and_fires_once(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env, overlap=Overlap.QUEUE)
    clock.at = T0 + HOUR
    await schedules.trigger_schedule(env, job.job_id)
    clock.at = T0 + 4.5 * HOUR

    waiting = [await schedules.trigger_schedule(env, job.job_id) for _ in range(2)]
    await finish_latest(env, job)
    after = [await schedules.trigger_schedule(env, job.job_id) for _ in range(2)]

    assert waiting == [Fired.WAITING, Fired.WAITING]
    assert after == [Fired.STARTED, Fired.NOT_DUE]
    assert [run.scheduled_for for run in await runs_of(env, job)] == [T0 + HOUR, T0 + 2 * HOUR]
    row = await row_of(env, job)
    assert row.next_fire_at == T0 + 5 * HOUR
    assert row.skips == (Skip(T0 + 3 * HOUR, clock.at, SkipReason.MISSED),)


async def test_only_the_latest_skips_are_kept(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.at = T0 + HOUR
    await schedules.trigger_schedule(env, job.job_id)

    for number in range(2, 30):
        clock.at = T0 + number * HOUR
        await schedules.trigger_schedule(env, job.job_id)

    skips = (await row_of(env, job)).skips
    assert [skip.first_at for skip in skips] == [T0 + number * HOUR for number in range(20, 30)]


async def test_an_at_schedule_fires_once_and_ends(env: Context, clock: ManualClock) -> None:
    job = await schedule(env, At("2023-11-15T09:30", "Europe/Berlin"))
    clock.at = T0 + 86400

    fired = [await schedules.trigger_schedule(env, job.job_id) for _ in range(2)]

    row = await row_of(env, job)
    assert fired == [Fired.STARTED, Fired.NOT_DUE]
    assert (row.next_fire_at, row.status) == (None, ScheduleStatus.ACTIVE)


async def test_nothing_fires_while_paused_and_missed_times_are_not_made_up_for(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env)
    for _ in range(2):
        await schedules.set_state(env, CALLER, job.job_id, ScheduleStatus.PAUSED)
    clock.at = T0 + 3.5 * HOUR

    paused = await schedules.trigger_schedule(env, job.job_id)
    for _ in range(2):
        await schedules.set_state(env, CALLER, job.job_id, ScheduleStatus.ACTIVE)
    resumed = await schedules.trigger_schedule(env, job.job_id)

    row = await row_of(env, job)
    assert (paused, resumed) == (Fired.NOT_DUE, Fired.NOT_DUE)
    assert await runs_of(env, job) == []
    assert row.next_fire_at == T0 + 4 * HOUR
    assert row.skips == (Skip(T0 + HOUR, clock.at, SkipReason.PAUSED),)


async def test_a_new_rule_counts_from_now_and_keeps_a_live_run(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env)
    clock.at = T0 + HOUR
    await schedules.trigger_schedule(env, job.job_id)
    clock.at = T0 + 1.5 * HOUR

    anchored = Rate(2, RateUnit.HOUR, clock.at)
    changed = await schedules.replace(env, CALLER, job.job_id, anchored, Overlap.QUEUE)

    assert changed.schedule.next_fire_at == T0 + 3.5 * HOUR
    assert changed.schedule.overlap is Overlap.QUEUE
    (run,) = await runs_of(env, job)
    assert run.status is RunStatus.RUNNING


async def test_setting_the_same_rule_again_changes_nothing(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env)
    before = await row_of(env, job)
    clock.advance(100)

    later_anchor = Rate(1, RateUnit.HOUR, clock.at)
    same = await schedules.replace(env, CALLER, job.job_id, later_anchor, Overlap.SKIP)

    assert same.schedule == before == await row_of(env, job)


async def test_a_rule_without_a_future_time_is_refused(env: Context, clock: ManualClock) -> None:
    past = At("2020-01-01T00:00", "UTC")
    job = await schedule(env)

    with pytest.raises(InvalidArgument):
        await schedule(env, past, number=701)
    with pytest.raises(InvalidArgument):
        await schedules.replace(env, CALLER, job.job_id, past, Overlap.SKIP)

    assert await env.store.read(JobKey(JobId(a_ulid(701)))) is None
    assert (await row_of(env, job)).rule == HOURLY


async def test_a_clock_that_was_set_back_fires_no_time_twice(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env)
    clock.at = T0 + HOUR
    await schedules.trigger_schedule(env, job.job_id)
    await finish_latest(env, job)
    clock.at = T0 + 0.5 * HOUR

    await schedules.replace(env, CALLER, job.job_id, DAILY, Overlap.SKIP)
    changed = await schedules.replace(env, CALLER, job.job_id, HOURLY, Overlap.SKIP)

    assert changed.schedule.next_fire_at == T0 + 2 * HOUR


async def test_a_nominal_time_whose_run_exists_only_advances_the_schedule(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env)
    by_hand = RunId(fire_id(job.job_id, T0 + HOUR))
    await rerun.rerun(env, CALLER, job.job_id, retry=None, run_id=by_hand)
    await finish_latest(env, job)
    clock.at = T0 + HOUR

    fired = await schedules.trigger_schedule(env, job.job_id)

    assert fired is Fired.PASSED
    assert len(await runs_of(env, job)) == 1
    assert (await row_of(env, job)).next_fire_at == T0 + 2 * HOUR


async def test_a_scheduled_job_can_be_fired_by_hand(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    before = await row_of(env, job)

    first = await start_rerun(env, job)
    await finish(env, first.run)
    second = await start_rerun(env, job)
    await finish(env, second.run)

    assert (first.rerun_of, second.rerun_of) == (None, first.run.run_id)
    assert first.is_later
    assert (first.retried, first.inherited) == (3, 0)
    assert [run.scheduled_for for run in await runs_of(env, job)] == [None, None]
    assert len(await rows_of(env, second.run)) == 3
    assert await row_of(env, job) == before


async def test_a_scheduled_run_can_be_rerun_in_part(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.advance(HOUR)
    await schedules.trigger_schedule(env, job.job_id)
    (first,) = await runs_of(env, job)
    await ingest_open(env, first)
    await work(env, first, missing([0]))

    second = await start_rerun(env, job, frozenset({TaskStatus.FAILED}))

    assert (second.retried, second.inherited) == (1, 2)


async def test_a_run_fired_by_hand_makes_the_schedule_skip_like_any_live_run(
    env: Context, clock: ManualClock
) -> None:
    job = await schedule(env)
    await start_rerun(env, job)
    clock.advance(HOUR)

    assert await schedules.trigger_schedule(env, job.job_id) is Fired.PASSED
    with pytest.raises(Conflict) as refusal:
        await start_rerun(env, job)
    assert refusal.value.code == "run_not_terminal"


async def test_the_list_is_kept_after_every_run(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.at = T0 + HOUR
    await schedules.trigger_schedule(env, job.job_id)
    run = await finish_latest(env, job)
    await runs.delete_run(env, CALLER, job.job_id, run.run_id)
    clock.at = T0 + 2 * HOUR

    await schedules.trigger_schedule(env, job.job_id)

    assert (await finish_latest(env, job)).total == 3


async def test_deleting_the_job_ends_the_schedule(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.advance(HOUR)
    await jobs.delete(env, CALLER, job.job_id)

    assert await schedules.trigger_schedule(env, job.job_id) is Fired.NOT_DUE
    assert await env.store.read(ScheduleKey(job.job_id)) is None
    assert await schedules.due_schedules(env, by=clock.at, after=None, limit=9) == []
    with pytest.raises(NotFound):
        await schedules.set_state(env, CALLER, job.job_id, ScheduleStatus.PAUSED)


async def test_no_tasks_can_be_added_to_a_scheduled_job(env: Context) -> None:
    job = await schedule(env)

    with pytest.raises(Conflict) as added:
        await add(env, job, 1)
    with pytest.raises(Conflict) as closed:
        await jobs.close(env, CALLER, job.job_id)

    assert added.value.code == closed.value.code == "job_not_open"


async def test_a_job_without_a_run_cannot_be_stopped_paused_or_rerun(env: Context) -> None:
    job = await schedule(env)

    with pytest.raises(Conflict) as stopped:
        await runs.stop(env, CALLER, job.job_id)
    with pytest.raises(Conflict) as paused:
        await runs.set_pause(env, CALLER, job.job_id, PauseState.PAUSED)
    with pytest.raises(Conflict) as retried:
        await start_rerun(env, job, frozenset({TaskStatus.FAILED}))

    codes = [refusal.value.code for refusal in (stopped, paused, retried)]
    assert codes == ["run_not_stoppable", "run_not_pausable", "no_prior_run"]


async def test_a_regular_job_has_no_schedule_to_change(env: Context) -> None:
    regular = (await submit(env, 1)).job

    with pytest.raises(Conflict):
        await schedules.replace(env, CALLER, regular.job_id, HOURLY, Overlap.SKIP)
    with pytest.raises(Conflict):
        await schedules.set_state(env, CALLER, regular.job_id, ScheduleStatus.PAUSED)


async def test_a_schedule_of_another_caller_is_not_found(env: Context) -> None:
    job = await schedule(env)

    with pytest.raises(NotFound):
        await schedules.replace(env, OTHER_CALLER, job.job_id, DAILY, Overlap.SKIP)
    with pytest.raises(NotFound):
        await schedules.set_state(env, OTHER_CALLER, job.job_id, ScheduleStatus.PAUSED)


async def test_a_run_of_the_schedule_is_found_by_its_id(env: Context, clock: ManualClock) -> None:
    job = await schedule(env)
    clock.advance(HOUR)

    await schedules.trigger_schedule(env, job.job_id)

    assert await env.store.read(RunKey(job.job_id, fire_id(job.job_id, T0 + HOUR))) is not None
    assert fire_id(job.job_id, T0) != fire_id(JobId(a_ulid(1)), T0)
