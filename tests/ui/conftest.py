"""Fixtures: a dashboard with a browser that is signed in as the caller Anna; a real server with
jobs in every state; Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.api.world import World
from tests.e2e.cloud import aws_deployment
from tests.ui.demo_server import DemoServer, a_demo_server, submit_demo_jobs
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
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DemoServer]:
    """A server with the embedded engine, and one with the AWS engine on local servers."""
    folder = tmp_path_factory.mktemp("ui")
    with ExitStack() as stack:
        environ = None
        if request.param == "aws":
            environ = stack.enter_context(aws_deployment(request, folder)).environ
        demo = stack.enter_context(a_demo_server(folder / "data", environ))
        submit_demo_jobs(demo)
        yield demo


@pytest.fixture(scope="package")
def browser() -> Iterator[Chromium]:
    # Playwright is not installed everywhere.
    from tests.ui.chromium import a_chromium

    with a_chromium() as browser:
        yield browser
