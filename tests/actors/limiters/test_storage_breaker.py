"""Pages that cannot be stored stop all fetching, and paid pages are kept and not fetched again."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock

from conveyor.domain import limits
from conveyor.domain.budget import BudgetCap, Price, Unit
from conveyor.domain.changes import BudgetKey, StatsKey
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import run_progress
from tests.actors.faults import Faults, faulty
from tests.actors.world import World, a_miss, a_page, make_world, urls

PAID = Price(credits=1)


def a_paid_page(request: ScrapeRequest, attempt: int) -> Outcome:
    return msgspec.structs.replace(a_page(request.url.encode() * 100), credits=1)


@dataclass(slots=True)
class FailingWrites:
    """A port whose writes fail for as long as `error` is set."""

    inner: Any
    error: Exception | None = None
    is_reached: Any = None

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.inner, name)
        is_write = name in {"add", "put", "commit"}
        if not is_write:
            return target

        async def write(*args: Any, **kwargs: Any) -> Any:
            await trio.lowlevel.checkpoint()
            if self.error is not None and (self.is_reached is None or self.is_reached(*args)):
                raise self.error
            return await target(*args, **kwargs)

        return write


def with_blobs(world: World) -> tuple[World, FailingWrites]:
    away = FailingWrites(world.env.blobs)
    return replace(world, env=replace(world.env, blobs=cast("Any", away))), away


@pytest.mark.parametrize("error", [StorageFull("full"), Unavailable("AccessDenied")], ids=str)
async def test_pages_are_paid_for_once_however_long_they_cannot_be_stored(
    autojump_clock: MockClock, error: Exception
) -> None:
    world, blobs = with_blobs(make_world(script=a_paid_page))

    async with world.working():
        accepted = await world.submit(urls(300), max_inflight=20)
        await trio.sleep(0.35)
        blobs.error = error
        await trio.sleep(5)
        fetched = world.gateway.calls.total()
        await trio.sleep(600)
        assert world.gateway.calls.total() == fetched < 300
        blobs.error = None
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed, totals.credits) == (300, 0, 300)
    assert world.gateway.calls.total() == 300


async def test_a_run_that_waits_for_storage_reports_it(autojump_clock: MockClock) -> None:
    world, blobs = with_blobs(make_world(script=a_paid_page))
    blobs.error = StorageFull("no room on /secret/path")

    async with world.working():
        accepted = await world.submit(urls(30))
        await trio.sleep(20)
        run = await world.run_of(accepted)
        seen = await run_progress.load_progress(world.env, run, await totals_of(world.env, run))
        blobs.error = None
        await trio.sleep(30)
        await world.wait_for_end(accepted)

    assert seen.waiting_on is not None
    assert seen.waiting_on.reason is WaitReason.STORAGE
    assert "full" in seen.waiting_on.detail
    assert "secret" not in seen.waiting_on.detail
    assert seen.eta_s is None


async def test_recovery_of_the_storage_is_found_by_single_probes(autojump_clock: MockClock) -> None:
    world, blobs = with_blobs(make_world(script=a_paid_page))
    tries: list[float] = []

    def note(*args: object) -> bool:
        tries.append(trio.current_time())
        return True

    async with world.working():
        await world.submit(urls(100))
        blobs.error, blobs.is_reached = StorageFull("full"), note
        await trio.sleep(30)
        tries.clear()
        await trio.sleep(100)
        # There is a probe at least every 10 s, each followed by one that tells whether the page or
        # the storage is at fault.
        assert 20 <= len(tries) <= 60
        blobs.error = None


async def test_without_held_pages_a_small_body_is_the_probe(autojump_clock: MockClock) -> None:
    world, blobs = with_blobs(make_world(script=a_paid_page))

    async with world.working():
        accepted = await world.submit(urls(5))
        blobs.error = StorageFull("full")
        await trio.sleep(5)
        await world.env.signals.teardown(accepted.job.job_id, accepted.run.run_id, deadline_s=5)
        other = await world.submit(urls(50))
        await trio.sleep(60)
        calls = world.gateway.calls.total()
        blobs.error = None
        _, totals = await world.wait_for_end(other)

    assert calls == 5
    assert totals.successful == 50


async def test_a_discarded_page_is_counted_in_the_cost_and_in_the_history(
    autojump_clock: MockClock,
) -> None:
    world, blobs = with_blobs(make_world(script=a_paid_page))

    async with world.working():
        accepted = await world.submit(urls(10), max_attempts=1)
        blobs.error = StorageFull("full")
        await trio.sleep(30)

    run = await world.run_of(accepted)
    totals = await totals_of(world.env, run)
    assert (totals.credits, totals.done) == (10, 0)
    for task in await world.tasks(accepted):
        assert (task.credits, task.attempts) == (1, 0)
        (entry,) = task.history
        assert entry.problem is not None
        assert (entry.problem.code, entry.credits) == ("page_discarded", 1)

    blobs.error = None
    async with world.working():
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.credits) == (10, 20)
    assert {len(task.history) for task in await world.tasks(accepted)} == {2}


async def test_the_number_of_held_pages_is_bounded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_BYTES_MAX", 50_000)

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return msgspec.structs.replace(a_page(b"x" * 10_000), credits=1)

    world, blobs = with_blobs(make_world(script=script))

    async with world.working():
        blobs.error = StorageFull("full")
        accepted = await world.submit(urls(20), max_attempts=1)
        await trio.sleep(60)
        run = await world.run_of(accepted)
        totals = await totals_of(world.env, run)
        assert world.gateway.calls.total() == 20
        assert totals.credits == 15
        blobs.error = None
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.credits) == (20, 35)


async def test_a_page_whose_settle_cannot_be_written_is_not_fetched_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_paid_page(request, attempt) if "1" in request.url else a_miss(retryable=False)

    world = make_world(script=script, think_s=1.0)
    store = FailingWrites(world.env.store)
    store.is_reached = lambda changes: any(
        isinstance(write.key, StatsKey) for change in changes for write in change.writes
    )
    world = replace(world, env=replace(world.env, store=cast("Any", store)))

    async with world.working():
        accepted = await world.submit(urls(50))
        await trio.sleep(0.5)
        store.error = Unavailable("the table is away")
        await trio.sleep(300)
        store.error = None
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (len([u for u in urls(50) if "1" in u]), 36)
    assert set(world.gateway.calls.values()) == {1}
    assert not [record for record in caplog.records if "crashed" in record.message]


async def test_a_budget_is_not_spent_on_pages_that_cannot_be_stored(
    autojump_clock: MockClock,
) -> None:
    world, blobs = with_blobs(make_world(script=a_paid_page))
    world.gateway.prices = PAID

    async with world.working():
        accepted = await world.submit(urls(50), budget=BudgetCap(Unit.CREDITS, 60))
        blobs.error = Unavailable("NoSuchBucket")
        await trio.sleep(300)
        blobs.error = None
        _, totals = await world.wait_for_end(accepted)

    budget = await world.env.store.read(BudgetKey(accepted.job.job_id, accepted.run.run_id))
    assert budget is not None
    assert (totals.successful, totals.credits, budget.left) == (50, 50, 10)


async def test_a_page_that_the_storage_never_accepts_fails_alone(
    autojump_clock: MockClock,
) -> None:
    world = make_world(script=a_paid_page)
    inner = world.env.blobs

    class BlobsThatRejectOnePage:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        async def add(self, prefix: str, name: str, parts: Any) -> Stored:
            await trio.lowlevel.checkpoint()
            if bytes(parts[0]).startswith(urls(1)[0].encode() * 2):
                raise Unavailable("this one times out")
            return await inner.add(prefix, name, parts)

    world = replace(world, env=replace(world.env, blobs=cast("Any", BlobsThatRejectOnePage())))

    async with world.working():
        accepted = await world.submit(urls(200), max_attempts=2, max_inflight=10)
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (199, 1)
    failed = [task for task in await world.tasks(accepted) if task.problem is not None]
    assert [task.problem.code for task in failed if task.problem] == ["worker_crashed"]


async def test_a_single_failed_write_stops_no_fetch(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(before=Counter({"add": 1}))
    world = make_world(script=a_paid_page)
    world = replace(world, env=replace(world.env, blobs=faulty(world.env.blobs, faults)))

    async with world.working():
        _, totals = await world.wait_for_end(await world.submit(urls(80)))

    assert (totals.successful, world.gateway.calls.total()) == (80, 80)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
