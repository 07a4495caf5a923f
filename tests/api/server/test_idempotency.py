"""Idempotency-Key: one effect, one answer, whoever asks again and however it went wrong."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from conveyor.domain import idempotency, limits
from conveyor.domain.changes import Change, RecordKey, Verdict
from conveyor.domain.ids import caller_id
from conveyor.ports.errors import Unavailable
from tests.api.world import ANNA, BERT, SECRET, Seen, World

BODY = {"tasks": [{"url": "https://example.com/"}]}


def _with(key: str) -> dict[str, Any]:
    return {"headers": {"Idempotency-Key": key}}


async def _job_count(world: World, key: str = ANNA) -> int:
    return len((await world.get("/v1/jobs?limit=100", key=key)).json["jobs"])


async def test_the_same_request_again_is_answered_the_same_byte_for_byte(world: World) -> None:
    first = await world.post("/v1/jobs", BODY, **_with("k"))
    world.clock.advance(100)
    await world.finish(first.json)
    again = await world.post("/v1/jobs", BODY, **_with("k"))

    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["Content-Type"] == first.headers["Content-Type"]
    assert await _job_count(world) == 1


async def test_of_fifty_at_once_one_works_and_the_others_replay_or_wait(world: World) -> None:
    seen: list[Seen] = []

    async def ask() -> None:
        seen.append(await world.post("/v1/jobs", BODY, **_with("k")))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(ask)

    bodies = {response.body for response in seen if response.status == 201}
    waiting = [response for response in seen if response.status != 201]
    assert len(bodies) == 1
    assert {(response.status, response.code) for response in waiting} <= {
        (409, "idempotency_in_progress")
    }
    assert all(int(response.headers["Retry-After"]) >= 1 for response in waiting)
    assert await _job_count(world) == 1


async def test_a_key_with_another_body_is_a_conflict(world: World) -> None:
    await world.post("/v1/jobs", BODY, **_with("k"))

    seen = await world.post("/v1/jobs", {**BODY, "name": "other"}, **_with("k"))

    assert (seen.status, seen.code) == (409, "idempotency_key_conflict")
    assert await _job_count(world) == 1


async def test_a_key_is_its_callers_own(world: World) -> None:
    mine = await world.post("/v1/jobs", BODY, **_with("k"))
    theirs = await world.post("/v1/jobs", BODY, key=BERT, **_with("k"))

    assert mine.json["job_id"] != theirs.json["job_id"]
    assert (await _job_count(world, ANNA), await _job_count(world, BERT)) == (1, 1)


async def test_a_key_on_another_path_is_another_key(world: World) -> None:
    job = (await world.post("/v1/jobs", {"status": "open"}, **_with("k"))).json
    path = f"/v1/jobs/{job['job_id']}"

    added = await world.post(f"{path}/tasks", BODY, **_with("k"))
    again = await world.post(f"{path}/tasks", BODY, **_with("k"))

    assert added.status == 200
    assert added.body == again.body
    assert (await world.get(path)).json["latest_run"]["stats"]["total"] == 1


async def test_the_query_is_part_of_the_request(world: World) -> None:
    job = await world.submit(2)
    await world.post(f"/v1/jobs/{job['job_id']}/stop")
    path = f"/v1/jobs/{job['job_id']}/rerun"

    first = await world.post(path, **_with("k"))
    again = await world.post(path, **_with("k"))
    other = await world.post(f"{path}?status=pending", **_with("k"))

    assert first.status == 201
    assert first.body == again.body
    assert other.code == "idempotency_key_conflict"
    assert len((await world.get(f"/v1/jobs/{job['job_id']}/runs")).json["runs"]) == 2


@pytest.mark.parametrize("verb", ["close", "stop", "cancel", "pause", "resume"])
async def test_every_post_replays(world: World, verb: str) -> None:
    job = (await world.post("/v1/jobs", {"status": "open"})).json
    path = f"/v1/jobs/{job['job_id']}/{verb}"

    first = await world.post(path, **_with("k"))
    world.clock.advance(5)
    again = await world.post(path, **_with("k"))

    assert first.status == 200
    assert (again.status, again.body) == (first.status, first.body)


async def test_a_refusal_is_an_answer_and_is_replayed(world: World) -> None:
    bad = {"tasks": [{"url": "ftp://example.com/"}]}

    first = await world.post("/v1/jobs", bad, **_with("k"))
    again = await world.post("/v1/jobs", bad, **_with("k"))

    assert first.status == 400
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["Content-Type"] == "application/problem+json"


async def test_a_body_that_cannot_be_read_does_not_use_up_the_key(world: World) -> None:
    await world.post("/v1/jobs", raw=b"{", **_with("k"))
    await world.post("/v1/jobs", {"surprise": 1}, **_with("k"))

    assert (await world.post("/v1/jobs", BODY, **_with("k"))).status == 201


@pytest.mark.parametrize("key", ["", "a" * 129, "a\tb", "é", "\x7f"])
async def test_a_key_of_the_wrong_shape_is_refused(world: World, key: str) -> None:
    seen = await world.post("/v1/jobs", BODY, **_with(key))

    assert (seen.status, seen.code) == (400, "invalid_idempotency_key")
    assert await _job_count(world) == 0


async def test_two_keys_are_refused(world: World) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]

    seen = await world.post("/v1/jobs", BODY, headers=headers)

    assert (seen.status, seen.code) == (400, "invalid_idempotency_key")


async def test_a_key_that_expired_is_a_new_key(world: World) -> None:
    first = await world.post("/v1/jobs", BODY, **_with("k"))
    world.clock.advance(limits.IDEMPOTENCY_TTL_S + 1)

    again = await world.post("/v1/jobs", BODY, **_with("k"))

    assert again.status == 201
    assert again.json["job_id"] != first.json["job_id"]


async def test_after_its_owner_was_lost_the_same_job_is_finished(world: World) -> None:
    raw = b'{"tasks":[{"url":"https://example.com/"}]}'
    request = idempotency.Request(
        caller=caller_id(ANNA, SECRET),
        method="POST",
        path="/v1/jobs",
        key="k",
        fingerprint=idempotency.fingerprint(raw),
    )
    subject = world.env.new_id()
    claim = idempotency.claim_key(request, None, subject=subject, owner="lost", now=world.env.now())
    await world.env.commit(claim)

    early = await world.post("/v1/jobs", raw=raw, **_with("k"))
    world.clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
    late = await world.post("/v1/jobs", raw=raw, **_with("k"))

    assert (early.status, early.code) == (409, "idempotency_in_progress")
    assert 1 <= int(early.headers["Retry-After"]) <= limits.IDEMPOTENCY_CLAIM_S
    assert late.status == 201
    assert late.json["job_id"] == subject


async def test_after_an_outage_the_retry_finishes_the_same_job(
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

    first = await world.post("/v1/jobs", BODY, **_with("k"))
    again = await world.post("/v1/jobs", BODY, **_with("k"))

    assert (first.status, first.code) == (503, "unavailable")
    assert int(first.headers["Retry-After"]) >= 1
    assert again.status == 201
    assert await _job_count(world) == 1


async def test_no_answer_is_given_before_it_is_kept(world: World) -> None:
    seen = await world.post("/v1/jobs", BODY, **_with("k"))

    request = idempotency.Request(caller_id(ANNA, SECRET), "POST", "/v1/jobs", "k", "")
    record = await world.env.store.read(RecordKey(request.key_id))
    assert record is not None
    assert record.response_body == seen.body.decode()
    assert record.subject == seen.json["job_id"]
