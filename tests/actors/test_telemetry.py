"""Metrics and log lines of a worker: outcomes by result and reason, fetches, and long waits."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.model import FailureReason
from conveyor.ports.gateway import NotScraped, Scraped, ScrapeRequest
from tests.actors.world import a_miss, make_world, urls

PAGE = Scraped(status=200, content_type="text/html", body=b"12345")


def value(world_metrics: object, name: str, **labels: str) -> float | None:
    registry = world_metrics.registry  # type: ignore[attr-defined]
    found: float | None = registry.get_sample_value(name, labels)
    return found


async def test_outcomes_are_counted_by_result_and_reason(autojump_clock: MockClock) -> None:
    def answer(request: ScrapeRequest, attempt: int) -> Scraped | NotScraped:
        bad = a_miss(FailureReason.BLOCKED, retryable=False)
        return bad if request.url.endswith("0") else PAGE

    world = make_world(script=answer)
    async with world.working():
        accepted = await world.submit(urls(3))
        await world.ended(accepted)

    outcomes = "conveyor_task_outcomes_total"
    assert value(world.metrics, outcomes, result="successful", reason="") == 2
    assert value(world.metrics, outcomes, result="failed", reason="blocked") == 1
    assert value(world.metrics, "conveyor_fetch_responses_total", status_class="2xx") == 2
    assert value(world.metrics, "conveyor_fetch_responses_total", status_class="5xx") == 1
    assert value(world.metrics, "conveyor_fetch_body_bytes_total") == 10
    assert value(world.metrics, "conveyor_fetch_seconds_count") == 3


async def test_a_long_wait_is_logged_once_with_its_reason(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(script=lambda request, attempt: a_miss(FailureReason.RATE_LIMITED))
    async with world.working():
        accepted = await world.submit(urls(1), max_attempts=9)
        await trio.sleep(400)

    lines = [record for record in caplog.records if record.message == "run waits"]
    assert lines
    assert {record.reason for record in lines} == {"rate_limited"}  # type: ignore[attr-defined]
    assert {record.run for record in lines} == {accepted.run.run_id}  # type: ignore[attr-defined]
    assert all(record.levelno == logging.WARNING for record in lines)
