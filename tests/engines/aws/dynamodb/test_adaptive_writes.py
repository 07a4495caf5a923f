"""Adaptive concurrency: each shard is written at its own speed and does not delay the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.model import Task
from conveyor.engines.aws.dynamodb.table import (
    WIDTH,
    WIDTH_MAX,
    WRITTEN_MAX,
    AdaptiveConcurrency,
    put_rows,
)
from conveyor.engines.aws.errors import AwsError
from conveyor.ports.errors import Unavailable
from tests.builders import RUN, a_task

CALL_S = 0.01


def tasks_of(shard: int, count: int) -> list[Task]:
    made = [a_task(shard * 10_000 + number) for number in range(count)]
    return [msgspec.structs.replace(task, shard=shard) for task in made]


def throttled() -> Unavailable:
    error = Unavailable("dynamodb.PutItem: ThrottlingException")
    error.__cause__ = AwsError("ThrottlingException", "slow down")
    return error


class Shards:
    """Accepts a number of concurrent rows per shard and throttles the others."""

    def __init__(self, *, is_refused_whole: bool = True, **at_once: int) -> None:
        self.at_once = at_once
        self.is_refused_whole = is_refused_whole
        self.busy: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.ended_at: dict[int, float] = {}

    async def put(self, tasks: Sequence[Task]) -> list[Task]:
        shard = tasks[0].shard
        assert len(tasks) <= WRITTEN_MAX
        room = max(self.at_once.get(f"shard_{shard}", 10**9) - self.busy[shard], 0)
        taken, left = tasks[:room], list(tasks[room:])
        self.refused[shard] += len(left)
        if not taken and self.is_refused_whole:
            raise throttled()
        self.busy[shard] += len(taken)
        self.most[shard] = max(self.most[shard], self.busy[shard])
        await trio.sleep(CALL_S)
        self.busy[shard] -= len(taken)
        self.done.update(task.task_id for task in taken)
        self.ended_at[shard] = trio.current_time()
        return left


async def test_the_concurrency_of_a_shard_grows_to_its_maximum_while_no_write_is_throttled(
    autojump_clock: MockClock,
) -> None:
    shards, lanes = Shards(), AdaptiveConcurrency()

    await put_rows(lanes, tasks_of(0, 15_000), shards.put, Random(1))

    assert shards.most[0] == lanes.width_of((RUN, 0)) == WIDTH_MAX
    assert set(shards.done.values()) == {1}


async def test_a_throttled_shard_does_not_delay_the_others(
    autojump_clock: MockClock,
) -> None:
    shards, lanes = Shards(shard_1=30), AdaptiveConcurrency()
    of_shards = zip(tasks_of(0, 3_000), tasks_of(1, 3_000), strict=True)
    tasks = [task for pair in of_shards for task in pair]

    await put_rows(lanes, tasks, shards.put, Random(1))

    assert set(shards.done.values()) == {1}
    assert len(shards.done) == 6_000
    assert lanes.width_of((RUN, 1)) <= WIDTH < lanes.width_of((RUN, 0))
    assert shards.ended_at[0] < shards.ended_at[1] / 4
    assert shards.refused[1] < 3_000


@pytest.mark.parametrize("is_refused_whole", [True, False])
async def test_a_shard_that_accepts_nothing_is_given_up_when_the_others_are_written(
    autojump_clock: MockClock, is_refused_whole: bool
) -> None:
    shards = Shards(shard_1=0, is_refused_whole=is_refused_whole)

    with pytest.raises(Unavailable, match=r"[Tt]hrottl"):
        await put_rows(
            AdaptiveConcurrency(), [*tasks_of(1, 5), *tasks_of(0, 50)], shards.put, Random(1)
        )

    assert len(shards.done) == 50


async def test_a_shard_that_accepts_a_part_of_each_batch_is_not_given_up(
    autojump_clock: MockClock,
) -> None:
    shards = Shards(shard_0=1)

    await put_rows(AdaptiveConcurrency(), tasks_of(0, 100), shards.put, Random(1))

    assert set(shards.done.values()) == {1}
    assert len(shards.done) == 100


async def test_a_batch_with_a_lost_answer_is_written_again(autojump_clock: MockClock) -> None:
    tried: Counter[str] = Counter()

    async def put(tasks: Sequence[Task]) -> list[Task]:
        tried.update(task.task_id for task in tasks)
        if tried[tasks[0].task_id] == 1:
            raise Unavailable("no answer")
        return []

    await put_rows(AdaptiveConcurrency(), tasks_of(0, 20), put, Random(1))

    assert set(tried.values()) == {2}


async def test_a_permanent_error_is_raised(autojump_clock: MockClock) -> None:
    async def put(_: Sequence[Task]) -> list[Task]:
        raise AwsError("ValidationException", "no")

    with pytest.raises(AwsError):
        await put_rows(AdaptiveConcurrency(), tasks_of(0, 3), put, Random(1))
