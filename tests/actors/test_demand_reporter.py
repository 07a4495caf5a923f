"""The demand as a metric: one line a minute in the embedded metric format of CloudWatch."""

from __future__ import annotations

import json

import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock

from actors.demand_reporter import DemandReporter
from conveyor.domain.run.wait_reason import WorkerReport
from conveyor.telemetry import make_metrics
from conveyor.usecases.run import demand
from conveyor.usecases.run.demand import RunDemand
from conveyor.usecases.run.run_progress import publish_presence
from tests.usecases.world import a_world


async def test_each_minute_has_a_line_and_a_gauge(autojump_clock: MockClock) -> None:
    env = a_world().env
    lines: list[str] = []
    metrics = make_metrics(CollectorRegistry())
    reporter = DemandReporter(env=env, metrics=metrics, emit=lines.append, deployment="prod")
    await publish_presence(env, WorkerReport(200, 50))
    await demand.publish(env, [RunDemand(300)])

    with trio.move_on_after(90):
        await reporter.run()

    first = json.loads(lines[0])
    assert len(lines) == 2
    assert (first["Deployment"], first["DemandPercent"], first["Slots"]) == ("prod", 150.0, 200)
    (directive,) = first["_aws"]["CloudWatchMetrics"]
    assert directive["Dimensions"] == [["Deployment"]]
    assert {metric["Name"] for metric in directive["Metrics"]} <= first.keys()
    assert metrics.registry.get_sample_value("conveyor_demand_percent") == 150.0
