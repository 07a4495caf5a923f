"""Wrappers around a real engine whose calls fail before or after they take effect."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

import pytest
import trio

from conveyor.ports.errors import Unavailable
from tests.actors.world import World

P = TypeVar("P")


@dataclass(slots=True)
class Faults:
    """Faults by method. `before` and `after`: how many of the next calls fail before or after they
    take effect.

    `latency_s`: how long each call takes before it acts. `calls`: how many calls there were."""

    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    latency_s: Mapping[str, float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def fail_if_due(self, side: Counter[str], method: str) -> None:
        if side[method] > 0:
            side[method] -= 1
            self.fired[method] += 1
            raise Unavailable(f"{method} was struck")


def faulty(port: P, faults: Faults) -> P:
    return cast("P", _Faulty(port, faults))


class _Faulty:
    def __init__(self, port: object, faults: Faults) -> None:
        self._port = port
        self._faults = faults

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._port, method)
        if not iscoroutinefunction(target):
            return target

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._faults.calls[method] += 1
            self._faults.fail_if_due(self._faults.before, method)
            await trio.sleep(self._faults.latency_s.get(method, 0.0))
            answer = await target(*args, **kwargs)
            self._faults.fail_if_due(self._faults.after, method)
            return answer

        return call


def with_faults(world: World, faults: Faults) -> World:
    """The world with these faults around every shared port."""
    env = replace(
        world.env,
        store=faulty(world.env.store, faults),
        queue=faulty(world.env.queue, faults),
        coordinator=faulty(world.env.coordinator, faults),
    )
    return replace(world, env=env)


def count_errors(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(
        record.levelno >= logging.ERROR and text in record.getMessage() for record in caplog.records
    )


def has_crashed_actor(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.getMessage().startswith("child ") for record in caplog.records)
