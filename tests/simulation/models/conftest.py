"""One world per test, set up; tests ask for `autojump_clock` themselves, or it is not used."""

from __future__ import annotations

import pytest

from tests.simulation.models.worlds import World


@pytest.fixture
async def world() -> World:
    world = World()
    await world.set_up()
    return world
