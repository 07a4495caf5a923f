"""Tests the results of `python -m bench scale` for a small fleet."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from bench.fleet import Plan
from bench.scale import Load, measure
from bench.scale_table import COLD, Measured

pytestmark = pytest.mark.slow


async def a_small_fleet(tasks: int, *, table_writes: float = COLD) -> Measured:
    plan = Plan(workers=2, slots=10, shards=8, table_writes=table_writes, think_s=1.0)
    load = Load(tasks=tasks, part_min=0, callers=4)
    return await measure(plan, load, 1, lambda done, total: None)


async def test_slots_are_the_limit_of_a_fleet_far_from_every_other_limit(
    autojump_clock: MockClock,
) -> None:
    measured = await a_small_fleet(200)

    assert measured.limit == ("slots", "more workers")
    assert measured.slots_busy > 0.8


async def test_the_table_is_the_limit_of_a_fleet_with_too_little_capacity(
    autojump_clock: MockClock,
) -> None:
    measured = await a_small_fleet(200, table_writes=20.0)

    assert measured.limit == ("the table", "warm throughput")
    assert measured.throttled_per_task > 0


async def test_a_fleet_without_faults_fetches_every_page_once(autojump_clock: MockClock) -> None:
    measured = await a_small_fleet(100)

    assert measured.fetched_twice == 0
    assert measured.part == measured.tasks == 100
    assert {*measured.calls_per_task} == {"dynamodb", "redis", "s3", "sqs"}
