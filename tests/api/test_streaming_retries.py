"""Long lists that are sent again: one job comes of a key, wherever the first try ended."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable

import pytest

from conveyor.domain import idempotency, limits
from conveyor.domain.changes import Change, Verdict
from conveyor.domain.ids import caller_id
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import Unavailable
from tests.api.streaming import COUNT, a_world, keyed, lines, staged, walk
from tests.api.world import ANNA, SECRET, World
from tests.usecases.faults import Fault, When, with_fault


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return a_world(monkeypatch)


async def test_the_same_long_request_again_is_answered_the_same(world: World) -> None:
    first = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))
    again = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))
    other = await world.post("/v1/jobs", {"tasks": lines(COUNT + 1)}, **keyed("k"))

    assert (again.status, again.body) == (first.status, first.body)
    assert (other.status, other.code) == (409, "idempotency_key_conflict")
    assert len(staged(world)) == 1


async def test_after_an_outage_the_retry_of_a_long_request_finishes_the_same_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = world.engine.store.commit
    committed: list[Change] = []

    async def commit_then_lose_the_answer(changes: list[Change]) -> list[Verdict]:
        verdicts = await whole(changes)
        if len(changes[0].writes) > 1 and not committed:
            committed.extend(changes)
            raise Unavailable("the connection was lost after the commit")
        return verdicts

    monkeypatch.setattr(world.engine.store, "commit", commit_then_lose_the_answer)

    first = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))
    again = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))

    assert (first.status, again.status) == (503, 202)
    assert len((await world.get("/v1/jobs")).json["jobs"]) == 1
    job_id, run_id = again.json["job_id"], again.json["latest_run"]["run_id"]
    await walk(world, job_id, run_id)
    assert len(await world.tasks_of(job_id, run_id)) == COUNT
    assert len(staged(world)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
async def test_a_long_submit_cut_off_at_any_call_is_finished_by_a_retry(
    monkeypatch: pytest.MonkeyPatch, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        world = a_world(monkeypatch)
        fault = Fault(at, when)

        await world.seen_through(with_fault(world.env, fault)).post(
            "/v1/jobs", {"tasks": lines()}, **keyed("k")
        )
        world.clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
        again = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))

        assert again.status == 202
        assert len((await world.get("/v1/jobs")).json["jobs"]) == 1
        job_id, run_id = again.json["job_id"], again.json["latest_run"]["run_id"]
        await walk(world, job_id, run_id)
        rows = await world.tasks_of(job_id, run_id)
        assert [row.index for row in rows] == list(range(COUNT))
        goes_on = fault.was_reached
    assert at > 4


async def test_another_try_that_came_between_is_asked_to_come_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the list arrives, another process begins on the same key and is lost."""
    request = idempotency.Request(
        caller=caller_id(ANNA, SECRET),
        method="POST",
        path="/v1/jobs",
        key="k",
        fingerprint=idempotency.fingerprint(json.dumps({"tasks": lines()}).encode()),
    )
    claim = idempotency.claim_key(
        request, None, subject=world.env.new_id(), owner="lost", now=world.env.now()
    )
    whole = world.env.blobs.put_stream

    async def claim_then_put(key: str, pieces: AsyncIterable[bytes]) -> Stored:
        await world.env.commit(claim)
        world.clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
        return await whole(key, pieces)

    monkeypatch.setattr(world.env.blobs, "put_stream", claim_then_put)

    seen = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))
    left = staged(world)
    again = await world.post("/v1/jobs", {"tasks": lines()}, **keyed("k"))

    assert (seen.status, seen.code) == (409, "idempotency_in_progress")
    assert left == []
    assert again.status == 202
