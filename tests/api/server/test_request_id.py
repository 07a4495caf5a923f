"""One id follows a request: through its response, its problem and its log lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from conveyor.logs import set_up_logging
from tests.api.world import World


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the program logs, as JSON lines."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    set_up_logging("json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def parse_lines(stream: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_every_log_line_of_a_request_has_its_id(world: World, lines: io.StringIO) -> None:
    body = {"tasks": [{"url": "https://example.com/"}]}

    seen = await world.post("/v1/jobs", body, headers={"X-Request-ID": "mine"})

    assert seen.headers["X-Request-ID"] == "mine"
    assert [line["message"] for line in parse_lines(lines)] == ["run started", "request"]
    assert {line["request_id"] for line in parse_lines(lines)} == {"mine"}


async def test_a_problem_has_the_id_of_its_request(world: World, lines: io.StringIO) -> None:
    seen = await world.get("/v1/jobs/none", headers={"X-Request-ID": "mine"})

    assert seen.json["instance"] == seen.headers["X-Request-ID"] == "mine"
    assert [line["request_id"] for line in parse_lines(lines)] == ["mine"]


async def test_each_request_has_an_id_of_its_own(world: World, lines: io.StringIO) -> None:
    first, second = await world.get("/v1/jobs"), await world.get("/v1/jobs")

    ids = [seen.headers["X-Request-ID"] for seen in (first, second)]
    assert len(set(ids)) == 2
    assert [line["request_id"] for line in parse_lines(lines)] == ids


async def test_a_line_outside_of_requests_has_no_id(world: World, lines: io.StringIO) -> None:
    await world.get("/v1/jobs")
    logging.getLogger("conveyor").info("something else")

    assert "request_id" not in parse_lines(lines)[-1]


async def test_the_end_of_a_run_is_logged_with_its_counts(world: World, lines: io.StringIO) -> None:
    job = await world.submit(2)
    (first, _) = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    await world.succeed(job["job_id"], first)

    await world.post(f"/v1/jobs/{job['job_id']}/stop")

    (line,) = [line for line in parse_lines(lines) if line["message"] == "run stopped"]
    assert line["run"] == job["latest_run"]["run_id"]
    assert (line["total"], line["successful"], line["failed"]) == (2, 1, 0)
