"""Fixtures: the ports of a memory engine with a manual clock, one set per test."""

from __future__ import annotations

import pytest

from conveyor.usecases.context import Context
from tests.builders import ManualClock
from tests.usecases.world import SignalLog, World, a_world


@pytest.fixture
def world() -> World:
    return a_world()


@pytest.fixture
def env(world: World) -> Context:
    return world.env


@pytest.fixture
def clock(world: World) -> ManualClock:
    return world.clock


@pytest.fixture
def signals(world: World) -> SignalLog:
    return world.signals
