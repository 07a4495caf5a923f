"""Compares the usage figures of deploy/aws/cost.py with a measurement on modelled AWS."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import trio

from bench import cost, small_jobs
from bench.fleet import Plan
from bench.scale import WARM
from conveyor.domain import limits
from conveyor.engines.aws.client.usage import S3_WRITE_REQUEST, Usage
from conveyor.simulation.deterministic_trio import JumpClock
from tests.deploy.templates import AWS, load

# A change of a figure by more than this has to be entered in cost.py and docs/deploy.md.
TOLERANCE = 0.05
INPUTS = runpy.run_path(str(AWS / "cost.py"))
STORES = pytest.mark.parametrize(
    ("store", "has_redis"), [("redis", True), ("no redis", False)], ids=["redis", "no redis"]
)


@pytest.mark.slow
@STORES
def test_a_page_uses_as_much_as_the_cost_script_assumes(store: str, has_redis: bool) -> None:
    workers = load("service.yaml")["Parameters"]["WorkerMin"]["Default"]
    slots = load("service.yaml")["Parameters"]["WorkerConcurrency"]["Default"]
    plan = Plan(
        workers=workers,
        slots=slots,
        shards=cost.SHARDS,
        table_writes=WARM,
        think_s=2.0,
        has_redis=has_redis,
    )

    metered = trio.run(cost.measure, plan, 10_000, 50, 1, clock=JumpClock())

    assert {
        "write_units": metered.write_units,
        "read_units": metered.read_units,
        "sqs_requests": metered.usd["SQS"] / INPUTS["SQS_MILLION"],
        "s3_puts": metered.usd["S3 requests"] / S3_WRITE_REQUEST,
        "row_bytes": metered.row_bytes,
    } == pytest.approx(_fields(INPUTS["USE"][store]), rel=TOLERANCE)


@pytest.mark.slow
@STORES
def test_an_idle_worker_uses_as_much_as_the_cost_script_assumes(
    store: str, has_redis: bool
) -> None:
    workers = load("service.yaml")["Parameters"]["WorkerMin"]["Default"]
    run = partial(small_jobs.measure, workers, 1, 1, has_redis=has_redis)

    idle = trio.run(run, clock=JumpClock()).idle

    assert {
        "write_units": _sum(idle, "write_units"),
        "read_units": _sum(idle, "read_units"),
        "sqs_requests": idle["receive"].calls,
    } == pytest.approx(_fields(INPUTS["IDLE"][store]), rel=TOLERANCE)


def test_bodies_and_rows_are_kept_as_long_as_the_cost_script_assumes() -> None:
    body_days = load("data.yaml")["Parameters"]["BodyDays"]["Default"]

    assert INPUTS["BODY_DAYS"] == body_days == limits.BODY_DAYS
    assert INPUTS["ROW_DAYS"] == body_days + limits.ROW_DAYS


def _fields(use: Any) -> dict[str, float]:
    return {name: getattr(use, name) for name in use.__dataclass_fields__}


def _sum(idle: Mapping[str, Usage], name: str) -> float:
    values: list[float] = [getattr(use, name) for use in idle.values()]
    return sum(values)
