"""Fixture: the application with its ports, one per test."""

from __future__ import annotations

import pytest

from tests.api.world import World, make_world


@pytest.fixture
def world() -> World:
    return make_world()
