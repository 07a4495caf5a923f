"""The counts of a run add up to its total at any time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.domain.errors import make_problem
from conveyor.domain.model import FailureReason, Job, PauseState, Run, Task, Totals
from conveyor.domain.run import settlement, termination
from conveyor.domain.run.settlement import Claimed, Cost
from conveyor.domain.run.wait_reason import RunOverview, RunProgress
from conveyor.ports.errors import QueueGone
from conveyor.ports.gateway import NotScraped
from conveyor.ports.queue import Message
from conveyor.schemas.responses import RunStats
from conveyor.schemas.views import run_view
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import ingest, runs, tasks
from tests.builders import CALLER
from tests.usecases.world import (
    LATER_FROM,
    PAGE,
    World,
    a_world,
    add,
    check_counters,
    run_of,
    submit,
    work,
)

BUSY = NotScraped(
    reason=FailureReason.TIMEOUT,
    problem=make_problem("timeout", "Too slow", 504),
    retryable=True,
)
STEPS = ("claim", "page", "busy", "hand_back", "lose", "wait", "pause", "add", "walk", "stop")
WEIGHTED = (*STEPS, *("claim", "busy", "wait", "hand_back") * 3)


def stats_of(run: Run, totals: Totals, leases: int) -> RunStats:
    return run_view(RunOverview(run, totals, RunProgress(inflight=leases))).stats


@dataclass
class History:
    """The steps of an open job and of a worker that holds some of its tasks."""

    world: World
    job: Job
    run: Run
    in_hand: list[tuple[Message, Task]] = field(default_factory=list)
    lists: int = 0

    @property
    def env(self) -> Context:
        return self.world.env

    async def claim(self) -> None:
        count = 3
        try:
            messages = await self.env.queue.receive(
                self.run.run_id, count_max=count, visibility_s=limits.VISIBILITY_S
            )
        except QueueGone:
            return
        await self.env.coordinator.acquire(
            self.run.job_id, self.run.run_id, count_max=count, cap=9, ttl_s=limits.LEASE_TTL_S
        )
        claims = await tasks.claim(self.env, [message.ref for message in messages])
        for message, claim in zip(messages, claims, strict=True):
            if isinstance(claim, Claimed):
                self.in_hand.append((message, claim.task))

    async def page(self) -> None:
        for message, task in self.in_hand[:1]:
            result = await tasks.store_body(self.env, message.ref, Claimed(task), PAGE)
            await self.env.commit(
                settlement.succeed(message.ref, task, result, spent=Cost(1), now=self.env.now())
            )
            await self.env.queue.ack((message,))
        self.in_hand = self.in_hand[1:]

    async def busy(self) -> None:
        for message, task in self.in_hand[:2]:
            await self.env.commit(
                settlement.release_for_retry(
                    message.ref, task, BUSY.problem, spent=Cost(), now=self.env.now()
                )
            )
            await self.env.queue.bounce((message,), delay_s=1)
        self.in_hand = self.in_hand[2:]

    async def hand_back(self) -> None:
        for message, task in self.in_hand[:1]:
            await tasks.release_claim(self.env, message.ref, task)
            await self.env.queue.bounce((message,), delay_s=0)
        self.in_hand = self.in_hand[1:]

    async def lose(self) -> None:
        """The worker dies; its claims lapse and its messages return."""
        self.in_hand = []
        self.world.clock.advance(limits.CLAIM_TTL_S + 1)

    async def wait(self) -> None:
        self.world.clock.advance(2)

    async def pause(self) -> None:
        if (await self.now()).ended_at is None:
            state = (await self.now()).pause_state
            other = PauseState.ACTIVE if state is PauseState.PAUSED else PauseState.PAUSED
            await runs.set_pause(self.env, CALLER, self.run.job_id, other)

    async def add(self) -> None:
        now = await self.now()
        if now.ended_at is None and now.open_batches == 0:
            self.lists += 1
            await add(self.env, self.job, 3, batch=f"b{self.lists}")

    async def walk(self) -> None:
        for batch in await ingest.open_batches_of(self.env, self.run.job_id, self.run.run_id):
            taken = await ingest.acquire_batch(self.env, batch)
            if taken is not None:
                await ingest.ingest_batch(self.env, taken)

    async def stop(self) -> None:
        if (await self.now()).ended_at is None:
            await self.env.commit(
                termination.request_stop(await self.now(), reason=None, now=self.env.now())
            )
            await self.hand_back()
            await runs.finish_stop(self.env, self.run.job_id, self.run.run_id)

    async def now(self) -> Run:
        return await run_of(self.env, self.run)

    async def shown(self) -> RunStats:
        leases = await self.env.coordinator.count(self.run.run_id)
        run = await self.now()
        return stats_of(run, await totals_of(self.env, run), leases)


async def a_history(count: int) -> History:
    world = a_world(shard_count=3)
    accepted = await submit(world.env, count, is_open=True)
    return History(world, accepted.job, accepted.run)


VERBS: dict[str, Callable[[History], Awaitable[None]]] = {
    name: getattr(History, name) for name in STEPS
}


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.sampled_from(WEIGHTED), min_size=1, max_size=40),
    count=st.sampled_from([4, LATER_FROM]),
)
async def test_the_counts_add_up_after_every_step_of_a_random_history(
    steps: list[str], count: int
) -> None:
    history = await a_history(count)

    for step in ["claim", *steps]:
        await VERBS[step](history)

        stats = await history.shown()
        parts = stats.inflight + stats.retrying + stats.pending + stats.completed
        assert parts == stats.total
        assert stats.completed == stats.successful + stats.failed
        await check_counters(history.env, history.run)


async def test_a_task_counts_as_retrying_only_between_its_attempts() -> None:
    world = a_world()
    accepted = await submit(world.env, 1, max_attempts=3)
    history = History(world, accepted.job, accepted.run)
    seen = []

    for step in ("claim", "busy", "wait", "claim", "hand_back", "claim", "busy", "wait", "claim"):
        await VERBS[step](history)
        seen.append((await history.shown()).retrying)

    assert seen == [0, 1, 1, 0, 1, 0, 1, 1, 0]


async def test_a_lapsed_claim_after_a_first_attempt_is_counted_once() -> None:
    world = a_world()
    accepted = await submit(world.env, 1)
    history = History(world, accepted.job, accepted.run)

    for step in ("claim", "busy", "wait", "claim", "lose", "claim"):
        await VERBS[step](history)

    assert (await check_counters(world.env, history.run)).retrying == 0
    assert len(history.in_hand) == 1


async def test_a_run_stopped_between_attempts_has_no_retrying_tasks() -> None:
    world = a_world()
    accepted = await submit(world.env, 2)
    history = History(world, accepted.job, accepted.run)

    for step in ("claim", "busy", "stop"):
        await VERBS[step](history)

    stats = await history.shown()
    assert (stats.retrying, stats.inflight, stats.pending, stats.total) == (0, 0, 2, 2)


async def test_counters_that_are_newer_than_the_run_row_still_add_up() -> None:
    world = a_world()
    accepted = await submit(world.env, 2, is_open=True)
    await add(world.env, accepted.job, 3)
    await work(world.env, accepted.run)

    older = accepted.run
    stats = stats_of(older, await totals_of(world.env, older), 0)

    assert (stats.total, stats.completed, stats.pending) == (5, 5, 0)
