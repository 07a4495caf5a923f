"""The demand for workers: how many tasks the live runs could have in flight, and the number of
slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conveyor.domain.model import PauseState
from conveyor.domain.run.wait_reason import RunReport, WaitReason, WorkerReport
from conveyor.usecases.context import Context
from conveyor.usecases.run import demand, reconcile, runs
from conveyor.usecases.run.demand import Demand, RunDemand, slots_for
from conveyor.usecases.run.run_progress import publish_presence, publish_reports
from tests.builders import CALLER, ManualClock
from tests.usecases.world import submit


@pytest.fixture
def measuring(env: Context) -> Context:
    return replace(env, config=replace(env.config, measures_demand=True, max_inflight=100))


async def sweep_and_load(env: Context) -> int:
    await demand.publish(env, (await reconcile.sweep_runs(env)).demand)
    return (await demand.load(env)).demand


async def test_the_demand_of_a_run_is_its_backlog_up_to_its_cap(measuring: Context) -> None:
    await submit(measuring, 30)
    await submit(measuring, 240)

    assert await sweep_and_load(measuring) == 30 + 100


async def test_a_paused_run_has_no_demand(measuring: Context) -> None:
    accepted = await submit(measuring, 30)
    await runs.set_pause(measuring, CALLER, accepted.job.job_id, PauseState.PAUSED)

    assert await sweep_and_load(measuring) == 0


async def test_the_demand_of_a_run_that_more_workers_cannot_help_is_its_current_leases(
    measuring: Context,
) -> None:
    accepted = await submit(measuring, 30)
    await measuring.coordinator.acquire(
        accepted.job.job_id, accepted.run.run_id, count_max=4, cap=100, ttl_s=60
    )
    report = RunReport(WaitReason.HOST_CAP, since=measuring.now())
    await publish_presence(measuring, WorkerReport(50, 4))
    await publish_reports(measuring, {accepted.run.run_id: report})

    assert await sweep_and_load(measuring) == 4


@pytest.mark.parametrize(("page_s", "needed"), [(0.5, 1), (5.0, 4), (150.0, 100)])
async def test_the_demand_of_a_run_is_enough_to_finish_within_minutes(
    measuring: Context, page_s: float, needed: int
) -> None:
    accepted = await submit(measuring, 240)
    await measuring.coordinator.acquire(
        accepted.job.job_id, accepted.run.run_id, count_max=10, cap=100, ttl_s=60
    )
    report = RunReport(rate=10 / page_s)
    await publish_presence(measuring, WorkerReport(50, 10))
    await publish_reports(measuring, {accepted.run.run_id: report})

    assert slots_for((await reconcile.sweep_runs(measuring)).demand, 10) == needed


def test_a_run_without_fetched_pages_is_estimated_from_other_runs() -> None:
    measured = RunDemand(100, 3_000, leases=10, rate=5.0)
    waiting = [RunDemand(100, 100)] * 30

    assert slots_for([measured, *waiting], 10) == 20 + 20
    assert slots_for(waiting, 0) == 3_000


def test_idle_leases_do_not_increase_the_estimated_time_of_a_page() -> None:
    quick = RunDemand(100, 3_000, leases=20, rate=10.0)
    slow = RunDemand(100, 300, leases=20, rate=1.0)

    assert slots_for([quick, slow], 40) == 20 + 20
    assert slots_for([quick, slow], 10) == 5 + 5


async def test_every_process_reads_the_same_percentage(measuring: Context) -> None:
    await publish_presence(measuring, WorkerReport(300, 20))
    other = replace(measuring, process_id="other")
    await publish_presence(other, WorkerReport(300, 40))
    await demand.publish(other, [RunDemand(480)])

    demands = [await demand.load(env) for env in (measuring, other)]

    assert demands == [Demand(480, 600, 60)] * 2
    assert demands[0].percent == 80.0


@pytest.mark.parametrize(("in_use", "percent"), [(100, 50.0), (200, 80.0)])
async def test_busy_workers_of_growing_runs_are_counted_as_needed_but_add_no_demand(
    measuring: Context, in_use: int, percent: float
) -> None:
    await publish_presence(measuring, WorkerReport(200, in_use))
    run = RunDemand(100, 300, leases=in_use, rate=50.0, grows=True)
    await demand.publish(measuring, [run])

    assert (await demand.load(measuring)).percent == percent


async def test_busy_workers_of_runs_about_to_end_are_not_counted_as_needed(
    measuring: Context,
) -> None:
    await publish_presence(measuring, WorkerReport(200, 150))
    await demand.publish(measuring, [RunDemand(200, 3_000, leases=150, rate=75.0)])

    assert (await demand.load(measuring)).demand == 20


@pytest.mark.parametrize(
    ("is_open", "age_s", "grows"), [(False, 10, True), (False, 400, False), (True, 400, True)]
)
async def test_open_runs_and_young_runs_count_as_growing(
    measuring: Context, clock: ManualClock, *, is_open: bool, age_s: float, grows: bool
) -> None:
    accepted = await submit(measuring, 240, is_open=is_open)
    clock.advance(age_s)
    report = RunReport(rate=1.0)
    await publish_presence(measuring, WorkerReport(50, 10))
    await publish_reports(measuring, {accepted.run.run_id: report})

    (run,) = (await reconcile.sweep_runs(measuring)).demand

    assert run.grows is grows


async def test_a_report_of_an_earlier_release_counts_all_slots_in_use(measuring: Context) -> None:
    await publish_presence(measuring, WorkerReport(200, 100))
    earlier = f'{{"at": {measuring.now()}, "slots": 10}}'
    await measuring.coordinator.put_status("another", {demand.SUBJECT: earlier}, ttl_s=60)

    assert (await demand.load(measuring)).demand == 100


async def test_a_draining_worker_has_no_slots(measuring: Context) -> None:
    await publish_presence(measuring, WorkerReport(300, 20, draining=True))

    assert (await demand.load(measuring)).slots == 0


async def test_a_sweep_measures_no_demand_unless_it_is_configured(env: Context) -> None:
    await submit(env, 30)

    assert (await reconcile.sweep_runs(env)).demand == []
