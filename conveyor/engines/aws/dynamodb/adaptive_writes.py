"""Adaptive concurrency: how many writes are sent to a shard at once
(docs/engines.md, DynamoDB store).

A partition accepts a limited number of writes a second. DynamoDB does not publish the current
number, and it changes over time. So each shard has a width of its own: one more after every
successful wave, half as many after a throttled one. Throttled rows are written again with the
next wave. No shard waits for another shard.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from conveyor.domain.ids import Random
from conveyor.domain.model import Task
from conveyor.engines.aws.client.retry import backoff_s
from conveyor.engines.aws.errors import AwsError, is_refused_for_now
from conveyor.ports.errors import Unavailable

# A shard starts with WIDTH. A smaller start takes longer to grow, a larger one is throttled sooner.
WIDTH, WIDTH_MAX = 4, 32
# Bounds the memory. A forgotten shard starts with WIDTH again.
_REMEMBERED_MAX = 1024
# Consecutive waves without one success before the call fails. A throttle passes, so it is tried
# more often than a lost answer, which usually took a timeout.
_THROTTLED_MAX, _LOST_MAX = 10, 3

Shard = Hashable
W = TypeVar("W")
Write = Callable[[W], Awaitable[None]]


@dataclass(slots=True)
class AdaptiveConcurrency:
    """The width of each shard that was used lately."""

    _widths: OrderedDict[Shard, int] = field(default_factory=OrderedDict)

    def width_of(self, shard: Shard) -> int:
        return self._widths.get(shard, WIDTH)

    def increase(self, shard: Shard) -> None:
        self._set(shard, min(WIDTH_MAX, self.width_of(shard) + 1))

    def decrease(self, shard: Shard) -> None:
        self._set(shard, max(1, self.width_of(shard) // 2))

    def _set(self, shard: Shard, width: int) -> None:
        self._widths[shard] = width
        self._widths.move_to_end(shard)
        if len(self._widths) > _REMEMBERED_MAX:
            self._widths.popitem(last=False)


async def put_rows(
    concurrency: AdaptiveConcurrency, tasks: Sequence[Task], put: Write[Task], random: Random
) -> None:
    """Writes all rows, each shard at its own rate. `put` must be safe to repeat."""
    by_shard: dict[Shard, deque[Task]] = {}
    for task in tasks:
        by_shard.setdefault((task.run_id, task.shard), deque()).append(task)
    await write_shards(concurrency, by_shard, put, random)


async def write_shards(
    concurrency: AdaptiveConcurrency,
    by_shard: Mapping[Shard, deque[W]],
    write: Write[W],
    random: Random,
) -> None:
    failures: list[AwsError | Unavailable] = []

    async def fill(shard: Shard, rows: deque[W]) -> None:
        try:
            await _write_shard(concurrency, shard, rows, write, random)
        except (AwsError, Unavailable) as error:
            # Collected, so that the failure of one shard does not cancel the writes of others.
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for shard, rows in by_shard.items():
            nursery.start_soon(fill, shard, rows)
    if failures:
        raise failures[0]


async def _write_shard(
    concurrency: AdaptiveConcurrency, shard: Shard, rows: deque[W], write: Write[W], random: Random
) -> None:
    throttled = lost = 0  # Consecutive waves without one success.
    while rows:
        wave = [rows.popleft() for _ in range(min(concurrency.width_of(shard), len(rows)))]
        failed = await _write_wave(wave, write)
        # Failed rows go to the front: they are written again before new ones.
        rows.extendleft(row for row, _ in reversed(failed))
        if not failed:
            concurrency.increase(shard)
        if len(failed) < len(wave):
            throttled = lost = 0
        elif any(_is_throttle(error) for _, error in failed):
            throttled += 1
        else:
            lost += 1
        if throttled == _THROTTLED_MAX or lost == _LOST_MAX:
            raise failed[0][1]
        if any(_is_throttle(error) for _, error in failed):
            concurrency.decrease(shard)
            await trio.sleep(backoff_s(1 + throttled, random))


async def _write_wave(wave: Sequence[W], write: Write[W]) -> list[tuple[W, Unavailable]]:
    """Writes a wave. Returns the rows that failed, with their errors."""
    failed: list[tuple[W, Unavailable]] = []
    refused: list[AwsError] = []

    async def do(row: W) -> None:
        try:
            await write(row)
        except Unavailable as error:
            failed.append((row, error))
        except AwsError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for row in wave:
            nursery.start_soon(do, row)
    if refused:
        raise refused[0]
    return failed


def _is_throttle(error: Unavailable) -> bool:
    return isinstance(error.__cause__, AwsError) and is_refused_for_now(error.__cause__)
