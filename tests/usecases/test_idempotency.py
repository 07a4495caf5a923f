"""The work of an idempotency key is done once, and every call gets the same answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio

from conveyor.domain import limits
from conveyor.domain.changes import RecordKey
from conveyor.domain.errors import Conflict, KeyConflict, KeyInProgress, NotFound, Refused
from conveyor.domain.idempotency import Request
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.idempotency import StoredResponse, Work, run_once_per_key
from tests.builders import CALLER, ManualClock
from tests.usecases.faults import Fault, When, with_fault

REQUEST = Request(CALLER, "POST", "/v1/jobs", "key", "fingerprint")


def to_answer(refusal: Refused) -> StoredResponse:
    return StoredResponse(refusal.status, refusal.code)


def working(calls: list[str]) -> Work:
    """Work that creates its subject, once per subject, as a submit does."""

    async def work(subject: str) -> StoredResponse:
        await trio.lowlevel.checkpoint()
        if subject not in calls:
            calls.append(subject)
        return StoredResponse(201, f"made {subject}")

    return work


def refusing(make: Callable[[], Exception]) -> Work:
    async def work(subject: str) -> StoredResponse:
        await trio.lowlevel.checkpoint()
        raise make()

    return work


async def test_a_second_call_gets_the_first_answer_without_any_work(env: Context) -> None:
    calls: list[str] = []
    first = await run_once_per_key(env, REQUEST, working(calls), to_answer)

    second = await run_once_per_key(env, REQUEST, refusing(AssertionError), to_answer)

    assert first == second == StoredResponse(201, f"made {calls[0]}")
    assert len(calls) == 1


@pytest.mark.parametrize("when", list(When))
async def test_a_call_interrupted_anywhere_is_finished_by_the_next_with_the_same_subject(
    env: Context, clock: ManualClock, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        request = replace_key(f"key-{at}")
        calls: list[str] = []
        fault = Fault(at, when)
        responses: list[StoredResponse] = []

        try:
            responses.append(
                await run_once_per_key(with_fault(env, fault), request, working(calls), to_answer)
            )
        except Unavailable:
            clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
        responses.append(await run_once_per_key(env, request, working(calls), to_answer))

        assert len(calls) == 1
        assert set(responses) == {StoredResponse(201, f"made {calls[0]}")}
        goes_on = fault.was_reached
    assert at > 2


def replace_key(key: str) -> Request:
    return Request(CALLER, "POST", "/v1/jobs", key, "fingerprint")


async def test_a_crash_leaves_a_claim_that_lapses(env: Context, clock: ManualClock) -> None:
    """A process that dies cannot release its claim: every store call after the first failure fails
    too."""
    calls: list[str] = []
    dead = replace(env, store=with_fault(env, Fault(2, When.BEFORE, only="commit")).store)
    with pytest.raises(Unavailable):
        await run_once_per_key(dead, REQUEST, working(calls), to_answer)
    record = await env.store.read(RecordKey(REQUEST.key_id))
    assert record is not None
    let_go = record.claimed_until == 0.0

    clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
    answer = await run_once_per_key(env, REQUEST, working(calls), to_answer)

    assert not let_go
    assert calls == [record.subject]
    assert answer == StoredResponse(201, f"made {record.subject}")


async def test_a_key_used_for_another_request_is_a_conflict(env: Context) -> None:
    await run_once_per_key(env, REQUEST, working([]), to_answer)
    other = Request(CALLER, "POST", "/v1/jobs", "key", "another body")

    with pytest.raises(KeyConflict):
        await run_once_per_key(env, other, refusing(AssertionError), to_answer)


async def test_a_final_refusal_is_stored_as_the_answer(env: Context) -> None:
    first = await run_once_per_key(env, REQUEST, refusing(lambda: NotFound("no")), to_answer)

    again = await run_once_per_key(env, REQUEST, refusing(AssertionError), to_answer)

    assert first == again == StoredResponse(404, "not_found")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Conflict("later", retry_after_s=1), id="come back later"),
        pytest.param(lambda: Unavailable("down"), id="engine down"),
        pytest.param(lambda: RuntimeError("bug"), id="bug"),
    ],
)
async def test_anything_but_a_final_answer_releases_the_key(
    env: Context, make: Callable[[], Exception]
) -> None:
    calls: list[str] = []
    with pytest.raises(type(make())):
        await run_once_per_key(env, REQUEST, refusing(make), to_answer)

    answer = await run_once_per_key(env, REQUEST, working(calls), to_answer)

    assert answer.status == 201


async def test_the_first_error_is_raised_although_the_release_fails_too(env: Context) -> None:
    dying = with_fault(env, Fault(2, When.BEFORE, only="commit"))

    with pytest.raises(RuntimeError, match="the real cause"):
        await run_once_per_key(
            dying, REQUEST, refusing(lambda: RuntimeError("the real cause")), to_answer
        )


async def test_a_cancelled_call_releases_the_key(env: Context) -> None:
    calls: list[str] = []

    async def never(subject: str) -> StoredResponse:
        await trio.sleep_forever()
        raise AssertionError

    with trio.CancelScope() as scope:
        scope.cancel()
        await run_once_per_key(env, REQUEST, never, to_answer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_once_per_key, env, REQUEST, never, to_answer)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert (await run_once_per_key(env, REQUEST, working(calls), to_answer)).status == 201


async def test_concurrent_calls_do_the_work_once(env: Context) -> None:
    calls: list[str] = []
    responses: list[StoredResponse | KeyInProgress] = []

    async def call() -> None:
        try:
            responses.append(await run_once_per_key(env, REQUEST, working(calls), to_answer))
        except KeyInProgress as refusal:
            responses.append(refusal)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(call)

    answers = {answer for answer in responses if isinstance(answer, StoredResponse)}
    waits = [wait.retry_after_s for wait in responses if isinstance(wait, KeyInProgress)]
    assert answers == {StoredResponse(201, f"made {calls[0]}")}
    assert len(calls) == 1
    assert all(wait is not None and 0 <= wait <= limits.IDEMPOTENCY_CLAIM_S for wait in waits)


@pytest.mark.parametrize("early_s", [0.0, 1.0])
async def test_an_expired_key_is_treated_as_new(
    env: Context, clock: ManualClock, early_s: float
) -> None:
    calls: list[str] = []
    await run_once_per_key(env, REQUEST, working(calls), to_answer)

    clock.advance(limits.IDEMPOTENCY_TTL_S - early_s)
    with trio.fail_after(2):
        same = await run_once_per_key(env, REQUEST, working(calls), to_answer)
    clock.advance(early_s + 1)
    other = await run_once_per_key(env, REQUEST, working(calls), to_answer)

    assert same == StoredResponse(201, f"made {calls[0]}")
    assert other == StoredResponse(201, f"made {calls[1]}")
    assert len(calls) == 2


async def test_a_slow_first_call_and_its_successor_return_the_same_answer(
    env: Context, clock: ManualClock
) -> None:
    calls: list[str] = []
    responses: list[StoredResponse] = []
    go_on = trio.Event()

    async def slow(subject: str) -> StoredResponse:
        await go_on.wait()
        return StoredResponse(201, f"slowly {subject}")

    async def first() -> None:
        responses.append(await run_once_per_key(env, REQUEST, slow, to_answer))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
        responses.append(await run_once_per_key(env, REQUEST, working(calls), to_answer))
        go_on.set()

    assert responses == [StoredResponse(201, f"made {calls[0]}")] * 2
