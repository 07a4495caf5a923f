"""Tasks: one worker at a time claims a task, attempts are bounded, and a task is settled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from conveyor.domain import limits
from conveyor.domain.changes import Change, Verdict
from conveyor.domain.model import FailureReason, RunStatus, TaskRef, TaskStatus
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import (
    AlreadyDone,
    Claimed,
    HeldByOther,
    LostClaim,
    NoSuchTask,
    Settled,
    Throttled,
)
from conveyor.ports.errors import PartlyUnavailable
from conveyor.ports.gateway import NotScraped, Scraped
from conveyor.ports.queue import Message
from conveyor.ports.store import Store
from conveyor.usecases.context import Context
from conveyor.usecases.run import tasks
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import ManualClock, ref_to
from tests.usecases.world import MISS, PAGE, a_page, check_counters, rows_of, run_of, submit, work


@dataclass(frozen=True, slots=True)
class SecondAnswerLost:
    """A store that applies all changes and loses the verdict of the second."""

    inner: Store

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        first, _, *others = await self.inner.commit(changes)
        raise PartlyUnavailable("an answer was lost", [first, None, *others])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, slots=True)
class FirstChangeThrottled:
    """A store that throttles the first change and applies the others."""

    inner: Store

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        others = await self.inner.commit(changes[1:])
        raise PartlyUnavailable("throttled", [None, *others], turned_away={0})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


AGAIN = msgspec.structs.replace(MISS, retryable=True)


async def a_ref_of(env: Context, accepted: Accepted) -> TaskRef:
    (row, *_) = await rows_of(env, accepted.run)
    return ref_to(row, accepted.job.job_id)


async def claim_row(env: Context, ref: TaskRef) -> Claimed:
    claim = (await tasks.claim(env, [ref]))[0]
    assert isinstance(claim, Claimed)
    return claim


async def settle(env: Context, ref: TaskRef, claim: Claimed) -> settlement.SettleVerdict:
    result = await tasks.store_body(env, ref, claim, PAGE)
    finish = tasks.judge_success(env, ref, claim.task, PAGE, result)
    return settlement.settle_result(await env.commit(finish.change), claim.task)


async def test_a_task_is_claimed_by_one_worker_at_a_time(env: Context) -> None:
    ref = await a_ref_of(env, await submit(env, 1))
    first = await claim_row(env, ref)

    second = (await tasks.claim(env, [ref]))[0]

    assert second == HeldByOther(until=first.task.claim_until)


async def test_a_claim_with_a_lost_answer_does_not_affect_the_others_of_its_call(
    env: Context,
) -> None:
    rows = await rows_of(env, (accepted := await submit(env, 3)).run)
    refs = [ref_to(row, accepted.job.job_id) for row in rows]

    claims = await tasks.claim(replace(env, store=SecondAnswerLost(env.store)), refs)

    until = env.now() + limits.CLAIM_TTL_S
    assert [type(claim) for claim in claims] == [Claimed, HeldByOther, Claimed]
    assert claims[1] == HeldByOther(until=until)


async def test_a_throttled_claim_can_be_claimed_again_at_once(env: Context) -> None:
    rows = await rows_of(env, (accepted := await submit(env, 2)).run)
    refs = [ref_to(row, accepted.job.job_id) for row in rows]

    claims = await tasks.claim(replace(env, store=FirstChangeThrottled(env.store)), refs)

    assert claims[0] == Throttled()
    assert isinstance(claims[1], Claimed)
    assert isinstance((await tasks.claim(env, refs[:1]))[0], Claimed)


async def test_a_lapsed_claim_is_taken_over_under_the_next_number(
    env: Context, clock: ManualClock
) -> None:
    ref = await a_ref_of(env, await submit(env, 1))
    first = await claim_row(env, ref)
    clock.advance(limits.CLAIM_TTL_S + 1)

    second = await claim_row(env, ref)

    assert (second.task.claim, second.task.attempts) == (first.task.claim + 1, 0)


async def test_a_worker_that_lost_its_claim_cannot_settle_the_task(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    ref = await a_ref_of(env, accepted)
    zombie = await claim_row(env, ref)
    clock.advance(limits.CLAIM_TTL_S + 1)
    winner = await claim_row(env, ref)

    lost = await settle(env, ref, zombie)
    won = await settle(env, ref, winner)
    late = await settle(env, ref, zombie)

    assert lost == late == LostClaim()
    assert isinstance(won, Settled)
    assert (await check_counters(env, accepted.run)).done == 1


def page(body: bytes) -> Scraped:
    return Scraped(status=200, content_type="text/html", body=body)


async def test_a_worker_that_lost_its_claim_cannot_overwrite_the_winners_body(
    env: Context, clock: ManualClock
) -> None:
    ref = await a_ref_of(env, await submit(env, 1))
    zombie = await claim_row(env, ref)
    clock.advance(limits.CLAIM_TTL_S + 1)
    winner = await claim_row(env, ref)

    won = await tasks.store_body(env, ref, winner, page(b"winner"))
    lost = await tasks.store_body(env, ref, zombie, page(b"zombie"))

    assert won.key != lost.key
    assert [piece async for piece in env.blobs.open(won.key)] == [b"winner"]


async def test_settling_the_same_claim_twice_counts_once(env: Context) -> None:
    accepted = await submit(env, 1)
    ref = await a_ref_of(env, accepted)
    claim = await claim_row(env, ref)

    first = await settle(env, ref, claim)
    again = await settle(env, ref, claim)

    assert isinstance(first, Settled)
    assert again == Settled(None)
    assert (await check_counters(env, accepted.run)).done == 1


async def test_a_claim_distinguishes_a_terminal_task_from_an_unknown_one(env: Context) -> None:
    accepted = await submit(env, 1)
    ref = await a_ref_of(env, accepted)
    await settle(env, ref, await claim_row(env, ref))
    unknown = msgspec.structs.replace(ref, task_id="nope")

    assert (await tasks.claim(env, [ref]))[0] == AlreadyDone()
    assert (await tasks.claim(env, [unknown]))[0] == NoSuchTask()


@pytest.mark.parametrize("attempts_max", [1, 2, 4])
async def test_a_task_is_tried_as_often_as_its_job_allows(
    env: Context, clock: ManualClock, attempts_max: int
) -> None:
    accepted = await submit(env, 1, max_attempts=attempts_max)
    tries = 0
    while await work(env, accepted.run, lambda _: AGAIN):
        tries += 1
        clock.advance(400)

    (row,) = await rows_of(env, accepted.run)
    assert tries == attempts_max == row.attempts == len(row.history)
    assert (row.status, row.reason) == (TaskStatus.FAILED, FailureReason.BLOCKED)
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED
    await check_counters(env, accepted.run)


async def test_a_retry_makes_the_same_message_visible_later(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)

    await work(env, accepted.run, lambda _: AGAIN)

    depth = await env.queue.depth(accepted.run.run_id)
    assert (depth.visible, depth.hidden) == (0, 1)
    clock.advance(10)
    assert await work(env, accepted.run, a_page) == 1
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


async def test_a_permanent_failure_is_not_retried(env: Context) -> None:
    accepted = await submit(env, 1)

    await work(env, accepted.run, lambda _: MISS)

    (row,) = await rows_of(env, accepted.run)
    assert (row.status, row.attempts) == (TaskStatus.FAILED, 1)


async def test_a_retry_waits_as_long_as_the_site_asked_for(
    env: Context, clock: ManualClock
) -> None:
    patient: NotScraped = msgspec.structs.replace(AGAIN, retry_after_s=1000.0)
    accepted = await submit(env, 1)
    await work(env, accepted.run, lambda _: patient)

    clock.advance(999)
    too_soon = await work(env, accepted.run)
    clock.advance(2)

    assert too_soon == 0
    assert await work(env, accepted.run) == 1


async def test_a_task_whose_workers_keep_dying_fails(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, 1)
    ref = await a_ref_of(env, accepted)
    claim = await claim_row(env, ref)
    while (problem := settlement.lost_workers_problem(claim.task)) is None:
        clock.advance(limits.CLAIM_TTL_S + 1)
        claim = await claim_row(env, ref)

    finish = tasks.judge_exhausted(env, ref, claim.task, problem)
    await env.commit(finish.change)

    (row,) = await rows_of(env, accepted.run)
    assert (row.status, row.reason) == (TaskStatus.FAILED, FailureReason.OTHER)
    assert row.claim == limits.LOST_WORKERS_MAX + 2
    assert problem.code == "worker_crashed"
    await check_counters(env, accepted.run)


async def test_a_released_claim_uses_up_no_attempt(env: Context) -> None:
    accepted = await submit(env, 1)
    ref = await a_ref_of(env, accepted)
    for _ in range(limits.LOST_WORKERS_MAX + 2):
        claim = await claim_row(env, ref)
        assert settlement.lost_workers_problem(claim.task) is None
        await tasks.release_claim(env, ref, claim.task)

    assert (await claim_row(env, ref)).task.attempts == 0


async def test_a_request_has_one_identity_per_claim(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, 1)
    ref = await a_ref_of(env, accepted)
    first = await claim_row(env, ref)
    clock.advance(limits.CLAIM_TTL_S + 1)
    second = await claim_row(env, ref)

    identity = tasks.request_for(env, accepted.job, first).identity

    assert identity == tasks.request_for(env, accepted.job, first).identity
    assert identity != tasks.request_for(env, accepted.job, second).identity


# First deliveries are held after a read, without a write.


async def receive_all(env: Context, accepted: Accepted, count: int = 1) -> list[Message]:
    run_id = accepted.run.run_id
    return await env.queue.receive(run_id, count_max=count, visibility_s=limits.VISIBILITY_S)


async def take_one(env: Context, message: Message) -> Claimed:
    (claim,) = await tasks.take(env, [message])
    assert isinstance(claim, Claimed)
    return claim


async def test_a_first_delivery_is_held_without_a_write(env: Context) -> None:
    accepted = await submit(env, 1)
    before = await rows_of(env, accepted.run)
    (message,) = await receive_all(env, accepted)

    claim = await take_one(env, message)

    assert claim.task.claim == 0
    assert await rows_of(env, accepted.run) == before


async def test_a_first_delivery_settles_its_task_once(env: Context) -> None:
    accepted = await submit(env, 1)
    (message,) = await receive_all(env, accepted)
    claim = await take_one(env, message)

    first = await settle(env, message.ref, claim)
    again = await settle(env, message.ref, claim)

    (row,) = await rows_of(env, accepted.run)
    assert isinstance(first, Settled)
    assert again == Settled(None)
    assert (row.status, row.claim, row.attempts) == (TaskStatus.SUCCESSFUL, 1, 1)
    await check_counters(env, accepted.run)


async def test_a_redelivered_message_is_claimed_and_its_first_worker_cannot_settle(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    (message,) = await receive_all(env, accepted)
    slow = await take_one(env, message)
    clock.advance(limits.VISIBILITY_S + 1)
    (again,) = await receive_all(env, accepted)

    claim = await take_one(env, again)

    assert (again.receives, claim.task.claim) == (2, 1)
    assert await settle(env, message.ref, slow) == LostClaim()
    assert isinstance(await settle(env, again.ref, claim), Settled)
    await check_counters(env, accepted.run)


async def test_only_one_of_two_first_deliveries_of_a_task_settles(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    (message,) = await receive_all(env, accepted)
    one = await take_one(env, message)
    clock.advance(1)
    other = await take_one(env, message)

    bodies = [await tasks.store_body(env, message.ref, claim, PAGE) for claim in (one, other)]
    verdicts = [await settle(env, message.ref, claim) for claim in (one, other)]

    assert bodies[0].key != bodies[1].key
    assert [type(verdict) for verdict in verdicts] == [Settled, LostClaim]
    await check_counters(env, accepted.run)


async def test_a_second_message_of_a_task_in_one_batch_is_claimed_by_a_write(env: Context) -> None:
    accepted = await submit(env, 1)
    (message,) = await receive_all(env, accepted)

    claims = await tasks.take(env, [message, message])

    assert [claim.task.claim for claim in claims if isinstance(claim, Claimed)] == [0, 1]


async def test_a_first_delivery_without_cost_is_released_without_a_write(env: Context) -> None:
    accepted = await submit(env, 1)
    before = await rows_of(env, accepted.run)
    (message,) = await receive_all(env, accepted)
    claim = await take_one(env, message)

    await tasks.release_claim(env, message.ref, claim.task)

    assert await rows_of(env, accepted.run) == before


async def test_a_released_first_delivery_with_a_cost_counts_it(env: Context) -> None:
    accepted = await submit(env, 1)
    (message,) = await receive_all(env, accepted)
    claim = await take_one(env, message)

    await tasks.release_claim(env, message.ref, claim.task, spent=settlement.Cost(7))

    (row,) = await rows_of(env, accepted.run)
    assert (row.status, row.claim, row.handed_back, row.credits) == (TaskStatus.PENDING, 1, 1, 7)
    await check_counters(env, accepted.run)


async def test_a_first_delivery_that_a_heartbeat_extended_is_released_by_a_write(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    (message,) = await receive_all(env, accepted)
    claim = await take_one(env, message)
    clock.advance(30)
    await env.commit(settlement.extend_claim(message.ref, claim.task, now=env.now()))

    await tasks.release_claim(env, message.ref, claim.task)

    (row,) = await rows_of(env, accepted.run)
    assert (row.status, row.claim_until) == (TaskStatus.PENDING, 0.0)
