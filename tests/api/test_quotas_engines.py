"""Quotas over HTTP on engines that store: they hold on AWS, and no list grows 100-fold on disk."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.quota import DEFAULTS, Quota
from tests.api.world import ANNA, BERT, Seen, World, make_world
from tests.conformance.engines import ENGINES, Engine, fresh_engine

AWS_QUOTAS = {"live_runs": 3, "open_jobs": 2, "stored_tasks": 20, "exports_per_run": 2}


def _on(engine: Engine, world: World) -> World:
    env = replace(
        world.env,
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
    )
    return replace(world.seen_through(env), env=env)


@pytest.fixture
async def world(autojump_clock: MockClock) -> AsyncIterator[World]:
    limits = {**DEFAULTS, **{Quota(name): limit for name, limit in AWS_QUOTAS.items()}}
    base = make_world(quotas=limits)
    async with fresh_engine("aws-modelled", base.clock) as engine:
        yield _on(engine, base)


async def _submit(world: World, count: int = 1, key: str = ANNA, **more: Any) -> Seen:
    tasks = [{"url": f"https://example.com/{number}"} for number in range(count)]
    return await world.call("POST", "/v1/jobs", {"tasks": tasks, **more}, key=key)


def _is_refused(seen: Seen, quota: str) -> bool:
    return seen.status == 429 and seen.json["quota"] == quota


async def test_live_runs_are_limited_on_aws_over_two_processes(world: World) -> None:
    other = world.seen_through(world.env)
    statuses: list[int] = []

    async def submit(process: World) -> None:
        statuses.append((await _submit(process)).status)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(submit, (world, other)[number % 2])

    assert sorted(statuses) == [201] * 3 + [429] * 5
    assert (await _submit(world, key=BERT)).status == 201


async def test_open_jobs_are_limited_on_aws(world: World) -> None:
    for _ in range(2):
        assert (await _submit(world, status="open")).status == 201

    assert _is_refused(await _submit(world, status="open"), "open_jobs")
    assert (await _submit(world)).status == 201


async def test_stored_tasks_are_limited_on_aws_until_a_job_is_deleted(world: World) -> None:
    job_id = (await _submit(world, 25)).json["job_id"]

    assert _is_refused(await _submit(world), "stored_tasks")
    assert (await world.call("DELETE", f"/v1/jobs/{job_id}")).status == 202
    assert (await _submit(world)).status == 201


async def test_exports_of_a_run_are_limited_on_aws(world: World) -> None:
    job_id = (await _submit(world)).json["job_id"]
    assert (await world.call("POST", f"/v1/jobs/{job_id}/stop")).status == 200
    run_id = (await world.get(f"/v1/jobs/{job_id}")).json["latest_run"]["run_id"]
    path = f"/v1/jobs/{job_id}/runs/{run_id}/exports"
    for _ in range(2):
        assert (await world.call("POST", path)).status == 202

    assert _is_refused(await world.call("POST", path), "exports_per_run")


LONG_LINE = b'{"url":"http://a.bc/%s"}' % (b"x" * 2_000)


@pytest.mark.parametrize("is_compressed", [True, False])
@pytest.mark.parametrize("line", [b"{}", b'{"url":""}', b'{"url":"http://a.bc"}'])
@pytest.mark.parametrize("count", [100, 900, 4_000])
async def test_no_list_takes_up_more_than_100_times_its_bytes_on_disk(
    tmp_path: Path, line: bytes, count: int, is_compressed: bool
) -> None:
    sent, seen, grown = await _send_list(tmp_path, line, count, is_compressed=is_compressed)

    assert seen.status in {201, 413}
    assert grown <= max(100 * sent, 100_000)


@pytest.mark.parametrize(("line", "count"), [(b'{"url":""}', 200_000), (LONG_LINE, 400)])
async def test_a_list_that_is_small_only_while_compressed_is_refused(
    tmp_path: Path, line: bytes, count: int
) -> None:
    sent, seen, grown = await _send_list(tmp_path, line, count, is_compressed=True)

    assert sent < 5_000
    assert (seen.status, seen.code, grown) == (413, "request_too_large", 0)


async def _send_list(
    tmp_path: Path, line: bytes, count: int, *, is_compressed: bool
) -> tuple[int, Seen, int]:
    """How many bytes were sent, the answer, and by how much the data directory grew."""
    base = make_world()
    body = b'{"on_invalid":"skip","tasks":[' + b",".join([line] * count) + b"]}"
    sent = gzip.compress(body, 9) if is_compressed else body
    headers = {"Content-Type": "application/json"}
    if is_compressed:
        headers["Content-Encoding"] = "gzip"
    async with ENGINES["embedded"](tmp_path, base.clock, Random(1)) as engine:
        world = _on(engine, base)
        assert (await _submit(world)).status == 201
        before = _size_bytes(tmp_path)
        seen = await world.call("POST", "/v1/jobs", raw=sent, headers=headers)
        grown = _size_bytes(tmp_path) - before

    print(f"{len(sent)} bytes sent, status {seen.status}, {grown} bytes, {grown / len(sent):.0f}x")
    return len(sent), seen, grown


def _size_bytes(data_dir: Path) -> int:
    """Pages of the database, which a log only holds for a while, and bodies."""
    (database,) = data_dir.glob("*.db")
    connection = sqlite3.connect(database)
    ((pages,),) = connection.execute("PRAGMA page_count")
    ((free,),) = connection.execute("PRAGMA freelist_count")
    ((page_bytes,),) = connection.execute("PRAGMA page_size")
    connection.close()
    bodies = sum(path.stat().st_size for path in (data_dir / "blobs").rglob("*") if path.is_file())
    return int((pages - free) * page_bytes) + bodies
