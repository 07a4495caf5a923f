"""Stored bodies that were damaged where they lie: never 200 with other bytes."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from conveyor.domain.model import Task
from conveyor.usecases.run.results import CHECKED_BYTES_MAX
from tests.api.server.test_sockets import served
from tests.api.world import ANNA, World

LONG = b"0123456789abcdef" * (CHECKED_BYTES_MAX // 16 + 1)


async def _with_body(world: World, stored: bytes, *, body: bytes | None = None) -> tuple[str, Task]:
    """The address of a result whose stored bytes are others than were fetched."""
    job = await world.submit(1)
    run_id = job["latest_run"]["run_id"]
    (task,) = await world.tasks_of(job["job_id"], run_id)
    await world.succeed(job["job_id"], task, body or b"<p>")
    (task,) = await world.tasks_of(job["job_id"], run_id)
    assert task.result is not None
    await world.env.blobs.put(task.result.key, [stored])
    return f"/v1/jobs/{job['job_id']}/runs/{run_id}/tasks/{task.task_id}/content", task


@pytest.mark.parametrize("stored", [b"", b"x", b"<html>another</html>", LONG])
async def test_a_short_body_that_is_another_is_a_problem_and_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, stored: bytes
) -> None:
    path, task = await _with_body(world, stored)

    seen = await world.get(path)

    assert (seen.status, seen.code) == (500, "result_damaged")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    fields: dict[str, Any] = vars(record)
    assert (record.message, fields["task"]) == ("a stored body is damaged", task.task_id)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [LONG[:-1], LONG[:-1] + b"x", b"x" + LONG[1:], LONG + b"x"])
async def test_a_long_body_that_is_another_never_arrives_whole(
    world: World, caplog: pytest.LogCaptureFixture, stored: bytes
) -> None:
    path, _ = await _with_body(world, stored, body=LONG)

    async with served(world) as server, httpx.AsyncClient(base_url=server.url) as client:
        promised, arrived, is_broken = await _download(client, path)

    assert promised == len(LONG)
    assert is_broken
    assert len(arrived) < len(LONG)
    assert "a stored body is damaged" in caplog.messages


async def test_a_body_that_is_gone_is_not_found_and_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    path, task = await _with_body(world, b"x")
    assert task.result is not None
    await world.env.blobs.delete_prefix(task.result.key.rpartition("/")[0])

    seen = await world.get(path)

    assert (seen.status, seen.code) == (404, "not_found")
    assert "a stored body is missing" in caplog.messages


async def _download(client: httpx.AsyncClient, path: str) -> tuple[int, bytes, bool]:
    """The length that was promised, what came, and whether the connection broke off."""
    arrived, is_broken = b"", False
    async with client.stream("GET", path, headers={"X-API-Key": ANNA}) as answer:
        try:
            async for piece in answer.aiter_bytes():
                arrived += piece
        except httpx.RemoteProtocolError:
            is_broken = True
    return int(answer.headers["Content-Length"]), arrived, is_broken
