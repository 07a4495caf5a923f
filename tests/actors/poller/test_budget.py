"""A run with a budget: it reserves the price before each call, waits if the budget is too low, and
continues when it is raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from actors.poller.permit import BudgetReservations
from conveyor.domain.budget import Budget, BudgetCap, Price, Unit
from conveyor.domain.changes import BudgetKey, ShareKey
from conveyor.domain.ids import JobId
from conveyor.domain.model import RunStatus
from conveyor.domain.submit.admission import TaskDraft
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.usecases import budget as budgets
from conveyor.usecases.run import runs
from conveyor.usecases.submit.jobs import Accepted, Submission, submit
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, World, a_miss, a_page, make_world, urls


def a_priced_world(
    price: int = 10, cost: int | None = None, *, think_s: float = 0.1, misses: bool = False
) -> World:
    spent = price if cost is None else cost

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        outcome: Outcome = a_miss() if misses else a_page()
        return msgspec.structs.replace(outcome, credits=spent)

    world = make_world(script=script, think_s=think_s)
    world.gateway.prices = Price(credits=price)
    return world


def credit_cap(amount: int) -> BudgetCap:
    return BudgetCap(Unit.CREDITS, amount)


async def budget_of(world: World, accepted: Accepted) -> Budget:
    run = accepted.run
    budget = await world.env.store.read(BudgetKey(run.job_id, run.run_id))
    assert budget is not None
    return budget


async def test_a_run_never_spends_more_than_its_budget(autojump_clock: MockClock) -> None:
    world = a_priced_world(price=10)

    async with world.working():
        accepted = await world.submit(urls(40), budget=credit_cap(155))
        await trio.sleep(60)

    run = await world.run_of(accepted)
    assert world.gateway.calls.total() == 15
    assert run.status is RunStatus.RUNNING
    assert (await budget_of(world, accepted)).left == 5


async def test_a_run_that_waits_for_its_budget_continues_when_the_budget_is_raised(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world(price=10)

    async with world.working():
        accepted = await world.submit(urls(40), budget=credit_cap(100))
        await trio.sleep(60)
        asked_at = trio.current_time()
        await budgets.set_cap(world.env, CALLER, accepted.job.job_id, credit_cap(400))
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.credits) == (40, 400)
    assert trio.current_time() - asked_at < 5
    budget = await budget_of(world, accepted)
    assert (budget.cap, budget.left) == (400, 0)


async def test_a_run_that_waits_for_its_budget_can_be_stopped(autojump_clock: MockClock) -> None:
    world = a_priced_world(price=10)

    async with world.working():
        accepted = await world.submit(urls(40), budget=credit_cap(100))
        await trio.sleep(60)
        stopped = await runs.stop(world.env, CALLER, accepted.job.job_id)

    assert stopped.run.status is RunStatus.STOPPED
    assert stopped.totals.successful == 10


async def test_the_unspent_part_of_a_reservation_pays_for_other_calls(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world(price=25, cost=1)

    async with world.working():
        accepted = await world.submit(urls(76), budget=credit_cap(100))
        _, totals = await world.wait_for_end(accepted)
        await trio.sleep(5)

    assert totals.credits == 76
    assert (await budget_of(world, accepted)).left == 24


async def test_failed_attempts_that_are_charged_for_count_against_the_budget(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world(price=10, misses=True)

    async with world.working():
        await world.submit(urls(4), budget=credit_cap(100), max_attempts=10)
        await trio.sleep(3_600)

    assert world.gateway.calls.total() == 10


async def test_a_free_gateway_spends_no_budget(autojump_clock: MockClock) -> None:
    world = a_priced_world(price=0)

    async with world.working():
        accepted = await world.submit(urls(40), budget=credit_cap(1))
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 40
    assert (await budget_of(world, accepted)).left == 1


async def test_an_interrupted_call_counts_at_its_price(autojump_clock: MockClock) -> None:
    world = a_priced_world(price=10, think_s=3_600)

    async with world.working():
        accepted = await world.submit(urls(3), budget=credit_cap(100))
        await trio.sleep(5)
    await trio.sleep(5)

    assert (await budget_of(world, accepted)).left == 70


async def test_a_task_with_a_higher_price_waits_and_the_others_are_fetched(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world(price=1)
    world.gateway.dear_param = ("js_render", Price(credits=50))
    drafts = [TaskDraft(url=url) for url in urls(10)]
    drafts[0] = TaskDraft(url=drafts[0].url, params={"js_render": "true"})
    request = Submission(drafts=drafts, budget=credit_cap(30))

    async with world.working():
        accepted = await submit(world.env, CALLER, request, job_id=JobId(world.env.new_id()))
        await trio.sleep(120)

    tasks = await world.tasks(accepted)
    assert sorted(task.attempts for task in tasks) == [0] + [1] * 9
    assert world.gateway.calls.total() == 9


async def test_a_call_that_costs_more_than_its_price_is_logged_and_counted(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world(price=10, cost=25)

    async with world.working():
        accepted = await world.submit(urls(40), budget=credit_cap(100))
        await trio.sleep(60)

    count = world.metrics.registry.get_sample_value(
        "conveyor_invariant_violations_total", {"invariant": "call_price"}
    )
    assert count == world.gateway.calls.total() == 10
    assert (await budget_of(world, accepted)).left == 100 - 250


async def test_a_reservation_whose_answer_was_lost_is_not_made_twice(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world(price=10)
    faults = Faults()
    world = replace(world, env=replace(world.env, store=faulty(world.env.store, faults)))

    async with world.working():
        accepted = await world.submit(urls(40), budget=credit_cap(1_000), max_inflight=2)
        for _ in range(20):
            faults.after["commit"] = 2
            await trio.sleep(5)
        _, totals = await world.wait_for_end(accepted)
        await trio.sleep(5)

    assert totals.successful == 40
    assert faults.fired["commit"] >= 4
    spent = 10 * world.gateway.calls.total()
    assert (await budget_of(world, accepted)).left == 1_000 - spent


async def test_an_amount_returned_with_a_lost_answer_is_reserved_again(
    autojump_clock: MockClock,
) -> None:
    world = a_priced_world()
    faults = Faults()
    env = replace(world.env, store=faulty(world.env.store, faults))
    accepted = await world.submit(urls(1), budget=credit_cap(100))
    purse = BudgetReservations(env, accepted.run, Unit.CREDITS, world.metrics)
    for toll in await purse.reserve([25, 25]):
        assert toll is not None
        purse.close(toll)
    faults.after["commit"] = 1
    with pytest.raises(Unavailable):
        await purse.return_unused()

    tolls = await purse.reserve([25, 25])

    assert None not in tolls
    assert (await budget_of(world, accepted)).left == 50


async def test_runs_without_a_budget_write_no_budget_rows(autojump_clock: MockClock) -> None:
    world = a_priced_world(price=10)
    written: list[Any] = []
    store = world.env.store

    class Watching:
        def __getattr__(self, method: str) -> Any:
            target = getattr(store, method)

            async def call(*args: Any, **kwargs: Any) -> Any:
                if method == "commit":
                    written.extend(write.key for change in args[0] for write in change.writes)
                if method == "read":
                    written.append(args[0])
                return await target(*args, **kwargs)

            return call

    watching: Any = Watching()
    world = replace(world, env=replace(world.env, store=watching))

    async with world.working():
        await world.wait_for_end(await world.submit(urls(40)))

    assert written
    assert not any(isinstance(key, BudgetKey | ShareKey) for key in written)
