"""A dry run answers what the real call would answer, whatever is asked for."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.api.test_upload import CSV, a_slot, path_of, put
from tests.api.world import Seen, World, make_world

GOOD = {"url": "https://example.com/"}
LINES: list[Any] = [
    GOOD,
    GOOD,
    {"url": "https://example.com/a", "metadata": {"a": "b"}},
    {"url": "ftp://example.com/"},
    {"url": "http://127.0.0.1/"},
    {"url": "https://example.com/", "zenrows_params": {"no_such": "1"}},
]
SCHEDULES: list[Any] = [
    {"rate": {"every": 5, "unit": "minute"}},
    {"rate": {"every": 0, "unit": "minute"}},
    {"at": "2001-01-01T10:00", "timezone": "UTC"},
    {"cron": "0 9 * * *", "timezone": "UTC"},
    {"cron": "61 * * * *", "timezone": "UTC"},
    None,
]
WEBHOOKS: list[Any] = [
    {"url": "https://hooks.example.com/x"},
    {"url": "http://hooks.example.com/x"},
    {"url": "https://hooks.example.com/x", "signature": True},
    {"url": "nonsense"},
]
BUDGETS: list[Any] = [
    {"credits": 10},
    {"credits": -1},
    {"credits": 0},
    {"cost": "1.00"},
    {"cost": "1.00", "credits": 1},
]


def _a_request(random: Random, inputs: list[str]) -> dict[str, Any]:
    """Most of it is right, and any of it may be wrong."""
    body: dict[str, Any] = {}
    optional: dict[str, list[Any]] = {
        "on_invalid": ["skip", "reject", "ignore"],
        "status": ["open", "closed", "deleted"],
        "zenrows_params": [{"js_render": "true"}, {"bogus": "x"}, {}],
        "metadata": [{"a": "b"}, {"a": "b" * 10_000}, {str(n): "x" for n in range(200)}],
        "webhook": WEBHOOKS,
        "budget": BUDGETS,
        "result_ttl_days": [1, 30, 31, 0],
        "max_inflight": [1, 0],
        "priority": [1, 99],
        "external_id": ["x", ""],
        "sfn_task_token": ["token"],
        "bogus": [1],
    }
    for name, values in optional.items():
        if random.random() < (0.4 if name == "on_invalid" else 0.12):
            body[name] = random.choice(values)
    if random.random() < 0.2:
        body["type"] = "scheduled"
        body["schedule"] = random.choice(SCHEDULES)
    if random.random() < 0.2:
        body["file_input_id"] = random.choice(inputs)
    if "file_input_id" not in body or random.random() < 0.1:
        body["tasks"] = [random.choice(LINES) for _ in range(random.choice([0, 1, 2, 3, 30]))]
        if random.random() < 0.6:
            body["tasks"] = [line for line in body["tasks"] if line is GOOD]
    return body


async def _inputs(world: World) -> list[str]:
    """Slots: one that nobody knows, an empty one, a good list, one of no lines, two bad ones."""
    slots = [await a_slot(world, spec) for spec, _ in UPLOADS]
    for slot, (_, content) in zip(slots, UPLOADS, strict=True):
        if content is not None:
            kind = slot["upload"]["headers"]["Content-Type"]
            uploaded = await put(world, path_of(slot), content, **{"Content-Type": kind})
            assert uploaded.status == 200, uploaded.body
    return ["01M7P9AM42BXDDS97CXEPWPC00", *(slot["file_input_id"] for slot in slots)]


UPLOADS: list[tuple[Any, bytes | None]] = [
    ({"format": "text"}, None),
    ({"format": "text"}, b"https://example.com/1\nhttps://example.com/2\nftp://x/\n"),
    ({"format": "text"}, b"\n"),
    ({"type": "csv", "csv": CSV}, b"a,b\n1,2\n"),
    ({"format": "ndjson"}, b"{\n"),
]


def _predicted_total(dry: Seen) -> int:
    return int(dry.json["would_answer"]) if dry.status == 200 else dry.status


@pytest.mark.parametrize("seed", range(4))
async def test_a_dry_submit_answers_what_the_real_one_does(seed: int) -> None:
    random, world = Random(seed), make_world(sync_tasks_max=20)
    inputs, statuses = await _inputs(world), set()

    for _ in range(40):
        body = _a_request(random, inputs)
        dry = await world.post("/v1/jobs?dry_run=true", body)
        real = await world.post("/v1/jobs", body)

        statuses.add(real.status)
        assert _predicted_total(dry) == real.status, (body, dry.body, real.body)
        if dry.status >= 400:
            assert dry.code == real.code, body
        if real.status in {201, 202}:
            accepted = real.json["accepted_tasks"]
            assert dry.json["valid_tasks"] + dry.json["invalid_tasks_count"] == accepted

    assert statuses >= {201, 400}


async def test_a_dry_submit_leaves_nothing_behind(world: World) -> None:
    inputs = await _inputs(world)
    bodies_before, random = dict(world.engine.blobs.bodies()), Random(7)

    for _ in range(60):
        await world.post("/v1/jobs?dry_run=true", _a_request(random, inputs))

    assert (await world.get("/v1/jobs")).json["jobs"] == []
    assert dict(world.engine.blobs.bodies()) == bodies_before


RERUNS = [
    "",
    "?status=failed",
    "?status=successful",
    "?status=bogus",
    "?reason=blocked",
    "?host=example.com",
]


@pytest.mark.parametrize("query", RERUNS)
@pytest.mark.parametrize("state", ["live", "ended", "some failed", "open", "scheduled", "unknown"])
async def test_a_dry_rerun_answers_what_the_real_one_does(
    world: World, query: str, state: str
) -> None:
    job_id = await _a_job(world, state)
    path = f"/v1/jobs/{job_id}/rerun"

    dry = await world.post(f"{path}{query or '?'}{'&' if query else ''}dry_run=true")
    real = await world.post(path + query)

    assert _predicted_total(dry) == real.status, (dry.body, real.body)
    if dry.status >= 400:
        assert dry.code == real.code


async def _a_job(world: World, state: str) -> str:
    if state == "unknown":
        return "01M7P9AM42BXDDS97CXEPWPC00"
    if state == "scheduled":
        body = {"type": "scheduled", "schedule": SCHEDULES[0], "tasks": [GOOD]}
        return str((await world.post("/v1/jobs", body)).json["job_id"])
    job = await world.submit(3, status="open" if state == "open" else "closed")
    if state == "ended":
        await world.finish(job)
    if state == "some failed":
        first, *others = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
        await world.fail(job["job_id"], first)
        for task in others:
            await world.succeed(job["job_id"], task)
    return str(job["job_id"])
