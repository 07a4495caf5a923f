"""Fixtures: one world per test. A test requests `autojump_clock` itself if it needs it."""

from __future__ import annotations

import pytest

from tests.simulation.models.worlds import World


@pytest.fixture
async def world() -> World:
    world = World()
    await world.set_up()
    return world
