"""Cursors: only what a list answered with, for the same caller, list and filter."""

from __future__ import annotations

import random
from urllib.parse import quote

import pytest

from tests.api.world import BERT, World

BAD = [
    "",
    "sh:AAAA",
    "v1.",
    "v1..",
    "v1.AAAA.",
    "%00",
    "\x00",
    "é",
    "x" * 1_000_000,
    "v1.é.é",
    "🦆",
]


async def _cursor(world: World, path: str, **options: str) -> str:
    seen = await world.get(path, **options)
    cursor: str = seen.json["next_cursor"]
    assert cursor is not None
    return cursor


def _damage(cursor: str) -> list[str]:
    noise = random.Random(3)
    flips = []
    for _ in range(40):
        at = noise.randrange(len(cursor))
        changed = chr(ord(cursor[at]) ^ (1 << noise.randrange(6)))
        flips.append(cursor[:at] + changed + cursor[at + 1 :])
    cuts = [cursor[:length] for length in range(0, len(cursor), 7)]
    return [text for text in flips + cuts if text != cursor]


@pytest.mark.parametrize("of", ["jobs", "runs", "results"])
async def test_a_cursor_that_was_not_answered_is_refused(world: World, of: str) -> None:
    job = await world.submit(3)
    await world.submit(1)
    await world.post(f"/v1/jobs/{job['job_id']}/stop")
    await world.post(f"/v1/jobs/{job['job_id']}/rerun")
    path = "/v1/jobs" if of == "jobs" else f"/v1/jobs/{job['job_id']}/{of}"
    good = await _cursor(world, f"{path}?limit=1")

    for bad in BAD + _damage(good):
        seen = await world.get(f"{path}?limit=1&cursor={quote(bad)}")
        assert (seen.status, seen.code) == (400, "invalid_cursor"), bad[:80]

    assert (await world.get(f"{path}?limit=1&cursor={quote(good)}")).status == 200


async def test_a_cursor_is_good_for_its_own_list_only(world: World) -> None:
    one, two = await world.submit(3), await world.submit(3)
    results = f"/v1/jobs/{one['job_id']}/results"
    run_results = f"/v1/jobs/{one['job_id']}/runs/{one['latest_run']['run_id']}/results"
    cursor = quote(await _cursor(world, f"{results}?limit=1"))

    elsewhere = [
        f"/v1/jobs/{two['job_id']}/results?cursor={cursor}",
        f"{results}?status=processing&cursor={cursor}",
        f"/v1/jobs?cursor={cursor}",
        f"/v1/jobs/{one['job_id']}/runs?cursor={cursor}",
    ]

    for path in elsewhere:
        seen = await world.get(path)
        assert (seen.status, seen.code) == (400, "invalid_cursor"), path
    assert (await world.get(f"{run_results}?cursor={cursor}")).status == 200


async def test_a_jobs_cursor_is_bound_to_its_caller_and_filter(world: World) -> None:
    for _ in range(2):
        await world.submit()
        await world.submit(key=BERT)
    cursor = quote(await _cursor(world, "/v1/jobs?limit=1"))

    theirs = await world.get(f"/v1/jobs?cursor={cursor}", key=BERT)
    filtered = await world.get(f"/v1/jobs?status=closed&cursor={cursor}")

    assert theirs.code == filtered.code == "invalid_cursor"


async def test_the_plain_id_of_a_task_of_this_run_is_a_cursor_too(world: World) -> None:
    job, other = await world.submit(3), await world.submit(3)
    rows = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    first, *rest = sorted(task.task_id for task in rows)
    (stranger, *_) = await world.tasks_of(other["job_id"], other["latest_run"]["run_id"])
    path = f"/v1/jobs/{job['job_id']}/results"

    seen = await world.get(f"{path}?cursor={first}")
    foreign = await world.get(f"{path}?cursor={stranger.task_id}")

    assert [row["task_id"] for row in seen.json["results"]] == rest
    assert foreign.code == "invalid_cursor"
