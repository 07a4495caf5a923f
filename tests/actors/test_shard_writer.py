"""ShardWriter: settles in groups, unknown outcomes, and acks after the completion check."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from actors.messages import Settle, ShardWriterMessage
from actors.runtime import Address, Mailbox, Reply
from actors.shard_writer import ShardWriter
from conveyor.domain.changes import Change, RunKey, TaskKey, Update, Verdict
from conveyor.domain.ids import RunId
from conveyor.domain.model import Result, RunStatus, Task
from conveyor.domain.queries import StatsOf
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claimed, Cost, LostClaim, Settled, SettleVerdict
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.ports.queue import Message
from conveyor.ports.store import Store
from conveyor.usecases.context import Context
from conveyor.usecases.run import tasks
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.faults import Faults, count_errors, faulty
from tests.actors.world import World, a_miss, a_page, make_world, urls

RESULT = Result("jobs/j/runs/r/t/1", 3, "0" * 64, "text/html", 200)


@asynccontextmanager
async def writing(world: World, env: Context) -> AsyncGenerator[Address[ShardWriterMessage], None]:
    mailbox: Mailbox[ShardWriterMessage] = Mailbox(capacity=1_000)
    async with trio.open_nursery() as nursery:
        writer = ShardWriter(env=env, metrics=world.metrics)
        nursery.start_soon(writer.run, mailbox.open_inbox())
        yield mailbox.address
        nursery.cancel_scope.cancel()


async def claim_tasks(world: World, accepted: Accepted) -> list[tuple[Message, Task]]:
    messages = await world.env.queue.receive(accepted.run.run_id, count_max=1_000, visibility_s=60)
    pairs = []
    for message in messages:
        claim = (await tasks.claim(world.env, [message.ref]))[0]
        assert isinstance(claim, Claimed)
        pairs.append((message, claim.task))
    return pairs


async def settle(
    writer: Address[ShardWriterMessage], message: Message, task: Task, change: Change
) -> SettleVerdict:
    def make(reply: Reply[SettleVerdict]) -> Settle:
        return Settle(message.ref, task, change, message, reply)

    verdict: SettleVerdict = await writer.ask(make, deadline_s=60)
    return verdict


def success_of(world: World, message: Message, task: Task) -> Change:
    now = world.env.now()
    return settlement.succeed(message.ref, task, RESULT, spent=Cost(), now=now)


async def test_the_last_settle_completes_the_run_and_acks_its_messages(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(120))
    pairs = await claim_tasks(world, accepted)

    async with writing(world, world.env) as writer, trio.open_nursery() as nursery:
        for message, task in pairs:
            nursery.start_soon(settle, writer, message, task, success_of(world, message, task))
        run, totals = await world.wait_for_end(accepted)

    assert run.status is RunStatus.COMPLETED
    assert totals.successful == 120
    depth = await world.env.queue.depth(run.run_id)
    assert (depth.visible, depth.hidden) == (0, 0)


async def test_a_settle_whose_answer_was_lost_is_counted_once(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(1))
    ((message, task),) = await claim_tasks(world, accepted)
    faults = Faults()
    faults.after["commit"] = 1
    env = replace(world.env, store=faulty(world.env.store, faults))

    async with writing(world, env) as writer:
        verdict = await settle(writer, message, task, success_of(world, message, task))
        _, totals = await world.wait_for_end(accepted)

    assert faults.fired["commit"] == 1
    assert isinstance(verdict, Settled)
    assert (totals.done, totals.successful) == (1, 1)


async def test_one_lost_claim_does_not_affect_the_other_settles_of_its_group(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(3))
    pairs = await claim_tasks(world, accepted)
    (lost_message, lost_task), *others = pairs
    await tasks.release_claim(world.env, lost_message.ref, lost_task)

    verdicts: list[SettleVerdict] = []
    async with writing(world, world.env) as writer, trio.open_nursery() as nursery:

        async def one(message: Message, task: Task) -> None:
            change = success_of(world, message, task)
            verdicts.append(await settle(writer, message, task, change))

        for message, task in pairs:
            nursery.start_soon(one, message, task)

    assert sorted(type(verdict).__name__ for verdict in verdicts) == [
        "LostClaim",
        "Settled",
        "Settled",
    ]
    assert len(others) == 2
    assert any(isinstance(verdict, LostClaim) for verdict in verdicts)


async def test_a_run_completes_although_acks_fail(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(1))
    ((message, task),) = await claim_tasks(world, accepted)
    faults = Faults()
    faults.before["ack"] = 1
    env = replace(world.env, queue=faulty(world.env.queue, faults))

    async with writing(world, env) as writer:
        await settle(writer, message, task, success_of(world, message, task))
        run, totals = await world.wait_for_end(accepted)

    assert faults.fired["ack"] == 1
    assert (run.status, totals.done) == (RunStatus.COMPLETED, 1)


POISON = urls(1)[0]


@dataclass(slots=True)
class CrashingStore:
    """A store that crashes at every settle of some task."""

    inner: Store
    is_bad: Any

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        if any(map(self.is_bad, changes)):
            raise ValueError("this cannot be written")
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_settle_that_crashes_the_writer_is_isolated_from_its_group(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()

    def is_bad(change: Change) -> bool:
        write = change.writes[0]
        is_task = isinstance(write, Update) and isinstance(write.key, TaskKey)
        values = write.values if is_task and isinstance(write, Update) else {}
        result = values.get("result")
        return result is not None and result.size_bytes == 1

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_page(b"x" if request.url == POISON else b"some page")

    world = replace(
        world, env=replace(world.env, store=cast("Any", CrashingStore(world.env.store, is_bad)))
    )
    world.gateway.script = script

    async with world.working():
        accepted = await world.submit(urls(80), max_attempts=2)
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (79, 1)
    assert world.gateway.calls.total() == 79 + 2
    assert count_errors(caplog, "a settle crashed its handler")
    assert count_errors(caplog, "a task crashed its handler") == 0, "logged where it happened"
    assert count_errors(caplog, "child") == 0


@dataclass(frozen=True)
class ThrottlingStore:
    """Takes 50 s for each commit of one run."""

    inner: Store
    run_id: RunId

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        keys = [write.key for change in changes for write in change.writes]
        if any(isinstance(key, TaskKey) and key.run_id == self.run_id for key in keys):
            await trio.sleep(50)
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_run_whose_rows_are_throttled_delays_no_other_run(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    long, short = [await world.submit(urls(3)), await world.submit(urls(3))]
    store = ThrottlingStore(world.env.store, long.run.run_id)
    env = replace(world.env, store=cast("Any", store))
    pairs = [pair for run in (long, short) for pair in await claim_tasks(world, run)]
    began_at = trio.current_time()

    async with writing(world, env) as writer, trio.open_nursery() as nursery:
        for message, task in pairs:
            nursery.start_soon(settle, writer, message, task, success_of(world, message, task))
        await world.wait_for_end(short)
        short_s = trio.current_time() - began_at
        await world.wait_for_end(long)

    assert short_s < 5
    assert trio.current_time() - began_at >= 50


@dataclass(slots=True)
class RefusingStore:
    """Refuses the first commits that write a run."""

    inner: Store
    refusals: int

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        keys = [write.key for change in changes for write in change.writes]
        if self.refusals and any(isinstance(key, RunKey) for key in keys):
            self.refusals -= 1
            raise Unavailable("throttled")
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_run_whose_completion_the_store_refuses_at_first_ends_without_a_redelivery(
    autojump_clock: MockClock,
) -> None:
    """A redelivery comes half a minute later, which is long for a list of ten pages."""
    world = make_world()
    accepted = await world.submit(urls(1))
    ((message, task),) = await claim_tasks(world, accepted)
    store = RefusingStore(world.env.store, refusals=3)
    env = replace(world.env, store=cast("Any", store))
    began_at = trio.current_time()

    async with writing(world, env) as writer:
        await settle(writer, message, task, success_of(world, message, task))
        run, _ = await world.wait_for_end(accepted)

    assert (run.status, store.refusals) == (RunStatus.COMPLETED, 0)
    assert trio.current_time() - began_at < 5


async def test_the_last_settle_of_a_run_is_not_delayed_to_be_grouped(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(2))
    (first, second) = await claim_tasks(world, accepted)
    pace = replace(world.env.config.pace, settle_s=30.0)
    env = replace(world.env, config=replace(world.env.config, pace=pace))
    began_at = trio.current_time()

    async with writing(world, env) as writer, trio.open_nursery() as nursery:
        nursery.start_soon(settle, writer, *first, success_of(world, *first))
        await trio.sleep(1)
        message, task = second

        def make(reply: Reply[SettleVerdict]) -> Settle:
            change = success_of(world, message, task)
            return Settle(message.ref, task, change, message, reply, is_last=True)

        await writer.ask(make, deadline_s=60)

    assert trio.current_time() - began_at < 2


@pytest.mark.parametrize("counts_together", [True, False])
async def test_a_run_of_several_shards_ends_wherever_its_tasks_are_counted(
    autojump_clock: MockClock, counts_together: bool
) -> None:
    world = make_world()
    pace = replace(world.env.config.pace, counts_together=counts_together)
    config = replace(world.env.config, pace=pace, sync_tasks_max=1, shard_count=4)
    world = replace(world, env=replace(world.env, config=config))
    calls: Counter[str] = Counter()

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        calls[request.url] += 1
        # A tenth of the tasks are tried twice: their retries are counted by shard.
        return a_miss() if request.url.endswith("3") and calls[request.url] == 1 else a_page()

    world.gateway.script = script

    async with world.working():
        accepted = await world.submit(urls(60))
        run, totals = await world.wait_for_end(accepted)
        query = StatsOf(job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count)
        rows = await world.env.store.find(query)

    assert run.status is RunStatus.COMPLETED
    assert (totals.admitted, totals.done, totals.successful, totals.retrying) == (60, 60, 60, 0)
    assert sum(row.done > 0 for row in rows) == (1 if counts_together else 4)
    assert all(row.retrying == 0 for row in rows)
