"""Metrics and log lines of a worker: outcomes by result and reason, fetches, and long waits."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock

from actors.runtime import Child, DynamicSupervisor, Policy, Strategy, Supervisor, nest
from actors.tree import actor_figures
from conveyor.domain.export_record import ExportFormat
from conveyor.domain.model import FailureReason, Webhook
from conveyor.ports.gateway import NotScraped, Scraped, ScrapeRequest
from conveyor.telemetry import make_metrics
from conveyor.usecases import export as exports
from tests.actors.world import a_miss, make_world, urls

PAGE = Scraped(status=200, content_type="text/html", body=b"12345")


def value(world_metrics: object, name: str, **labels: str) -> float | None:
    registry = world_metrics.registry  # type: ignore[attr-defined]
    sample: float | None = registry.get_sample_value(name, labels)
    return sample


async def test_outcomes_are_counted_by_result_and_reason(autojump_clock: MockClock) -> None:
    def answer(request: ScrapeRequest, attempt: int) -> Scraped | NotScraped:
        bad = a_miss(FailureReason.BLOCKED, retryable=False)
        return bad if request.url.endswith("0") else PAGE

    world = make_world(script=answer)
    async with world.working():
        accepted = await world.submit(urls(3))
        await world.wait_for_end(accepted)

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


async def test_metrics_show_the_leases_of_running_tasks_and_the_mailboxes(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=20, think_s=60)
    async with world.working() as supervisor:
        world.metrics.actors.watch(lambda: actor_figures(supervisor))
        for _ in range(3):
            await world.submit(urls(5))
        await trio.sleep(5)

        assert value(world.metrics, "conveyor_leases_held") == 15
        assert value(world.metrics, "conveyor_mailbox_messages", actor="pollers") == 0
        assert value(world.metrics, "conveyor_mailbox_capacity", actor="exporter") is None
        names = [figures.name for figures in actor_figures(supervisor)]

    # Three runs have three pollers with one metric name.
    assert names.count("pollers") == 1
    assert len(names) == len(set(names))


async def test_restarts_of_actors_are_counted_and_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    crashes = iter([RuntimeError("a bug"), RuntimeError("a bug")])

    async def fail_twice() -> None:
        error = next(crashes, None)
        if error is not None:
            raise error
        await trio.sleep_forever()

    metrics = make_metrics(CollectorRegistry())
    child = Child("frail", run=fail_twice)
    supervisor = Supervisor("root", strategy=Strategy.ONE_FOR_ONE, children=[child])
    metrics.actors.watch(lambda: actor_figures(supervisor))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(60)
        restarts = value(metrics, "conveyor_actor_restarts_total", actor="frail")
        nursery.cancel_scope.cancel()

    assert restarts == 2
    lines = [record for record in caplog.records if "crashed" in record.message]
    assert [record.child for record in lines] == ["frail", "frail"]  # type: ignore[attr-defined]


async def test_restarts_of_children_that_have_ended_still_count(
    autojump_clock: MockClock,
) -> None:
    crashes = iter([RuntimeError("a bug")])

    async def fail_once() -> None:
        error = next(crashes, None)
        if error is not None:
            raise error

    pollers = DynamicSupervisor("runs", stop_grace_s=1.0)
    supervisor = Supervisor("root", strategy=Strategy.ONE_FOR_ONE, children=[nest(pollers)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(1)
        child = Child("a run", run=fail_once, restart=Policy.TRANSIENT, stop_grace_s=1.0)
        await pollers.start_child(child)
        await trio.sleep(60)
        (figures,) = actor_figures(supervisor)
        nursery.cancel_scope.cancel()

    assert pollers.names() == ()
    assert (figures.name, figures.restarts) == ("pollers", 1)


async def test_ingested_lists_and_exports_are_counted_by_outcome(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    world = replace(
        world, env=replace(world.env, config=replace(world.env.config, sync_tasks_max=10))
    )
    async with world.working():
        run, _ = await world.wait_for_end(await world.submit(urls(20)))
        await exports.start(
            world.env,
            run.caller,
            run.job_id,
            run.run_id,
            ExportFormat.ZIP,
            export_id=world.env.new_id(),
        )
        await trio.sleep(30)

    ingested = value(world.metrics, "conveyor_ingest_batches_processed_total", outcome="sealed")
    assert ingested == 1
    exported = value(world.metrics, "conveyor_exports_processed_total", outcome="completed")
    assert exported == 1
    assert value(world.metrics, "conveyor_ingest_batches_running") == 0
    assert value(world.metrics, "conveyor_exports_running") == 0


async def test_each_failed_delivery_is_logged_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    world.notifier.failures = 2
    async with world.working():
        accepted = await world.submit(urls(1), webhook=Webhook("https://hooks.example/"))
        await world.wait_for_end(accepted)
        await trio.sleep(600)

    lines = [record for record in caplog.records if record.message == "webhook event not delivered"]
    assert [record.attempts for record in lines] == [1, 2]  # type: ignore[attr-defined]
    assert {record.job for record in lines} == {accepted.job.job_id}  # type: ignore[attr-defined]
    assert {record.run for record in lines} == {accepted.run.run_id}  # type: ignore[attr-defined]
    assert all(record.cause for record in lines)  # type: ignore[attr-defined]
    delivered = value(world.metrics, "conveyor_webhook_deliveries_total", outcome="delivered")
    assert delivered == 1
