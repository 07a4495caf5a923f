"""A world with a dashboard, and a browser in which Anna is signed in; a real server with jobs in
every state, and Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.api.world import World
from tests.e2e.cloud import a_cloud
from tests.ui.stage import Stage, a_stage, set_the_scene
from tests.ui.world import Browser, make_ui_world

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium


@pytest.fixture
def world() -> World:
    return make_ui_world()


@pytest.fixture
async def anna(world: World) -> Browser:
    browser = Browser(world)
    assert (await browser.sign_in()).status == 303
    return browser


@pytest.fixture(scope="package", params=["embedded", "aws"])
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A server on the embedded engine, and one on the AWS engine over local servers."""
    folder = tmp_path_factory.mktemp("ui")
    with ExitStack() as stack:
        environ = None
        if request.param == "aws":
            environ = stack.enter_context(a_cloud(request, folder)).environ
        stage = stack.enter_context(a_stage(folder / "data", environ))
        set_the_scene(stage)
        yield stage


@pytest.fixture(scope="package")
def browser() -> Iterator[Chromium]:
    # Playwright is not installed everywhere.
    from tests.ui.chromium import a_chromium

    with a_chromium() as browser:
        yield browser
