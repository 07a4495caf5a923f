"""A world with a dashboard, and a browser in which Anna is signed in."""

from __future__ import annotations

import pytest

from tests.api.world import World
from tests.ui.world import Browser, make_ui_world


@pytest.fixture
def world() -> World:
    return make_ui_world()


@pytest.fixture
async def anna(world: World) -> Browser:
    browser = Browser(world)
    assert (await browser.sign_in()).status == 303
    return browser
