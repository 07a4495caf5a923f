"""DemandReporter: publishes the demand for workers as a metric, for automatic scaling
(docs/deploy.md, Scaling).

Owns:    nothing: the demand is read from the status texts of all processes.
Hears:   nothing: it publishes every `period_s`.
Says:    nothing. `emit` gets one line in the embedded metric format of CloudWatch, which needs no
         permission: the platform collects the lines of the log.
Crashes: only by bug.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from conveyor.ports.errors import Unavailable
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.run import demand
from conveyor.usecases.run.demand import Demand

log = logging.getLogger(__name__)

NAMESPACE = "Conveyor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandReporter:
    """`deployment` is the dimension of the metrics."""

    env: Context
    metrics: Metrics
    emit: Callable[[str], None]
    deployment: str
    # CloudWatch has one value a minute, and a scaling rule decides once a minute.
    period_s: float = 60.0

    async def run(self) -> None:
        while True:
            try:
                current = await demand.load(self.env)
            except Unavailable as error:
                log.warning("demand not read", extra={"cause": str(error)})
            else:
                self.metrics.demand_percent.set(current.percent)
                self.emit(metric_line(current, self.deployment, self.env.now()))
            await trio.sleep(self.period_s)


def metric_line(current: Demand, deployment: str, now: float) -> str:
    """Returns the line. `Slots` and `SlotsInUse` are of all workers, so their average is meant."""
    values = {
        "DemandPercent": current.percent,
        "Demand": current.demand,
        "Slots": current.slots,
        "SlotsInUse": current.in_use,
    }
    units = {"DemandPercent": "Percent"}
    metrics = [{"Name": name, "Unit": units.get(name, "Count")} for name in values]
    directive = {"Namespace": NAMESPACE, "Dimensions": [["Deployment"]], "Metrics": metrics}
    header = {"Timestamp": int(now * 1000), "CloudWatchMetrics": [directive]}
    return json.dumps({"_aws": header, "Deployment": deployment, **values})
