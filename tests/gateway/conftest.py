"""A gateway in a process of its own, as it is run, and a site on loopback that it may reach."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from conveyor.gateway.browser.chromium import find_chromium
from tests.gateway.site import LocalSite, serve_site

KEY = "key-of-anna-1234567890"
needs_chromium = pytest.mark.skipif(
    find_chromium(None, os.environ) is None, reason="Chromium is not installed"
)


@dataclass
class RunningGateway:
    url: str
    notices: str  # What it said before it listened.
    process: subprocess.Popen[str]

    def get(self, url: str, **params: Any) -> httpx.Response:
        query = {"apikey": KEY, "url": url, **params}
        return httpx.get(self.url, params=query, timeout=120)

    def render(self, url: str, **params: Any) -> httpx.Response:
        return self.get(url, js_render="true", **params)


@contextmanager
def run_gateway(**environ: str) -> Iterator[RunningGateway]:
    command = [sys.executable, "-m", "conveyor.cli.main", "gateway", "--port", "0"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on", **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        notices = ""
        for line in process.stderr:
            if match := re.search(r"listening on (\S+)", line):
                yield RunningGateway(match[1], notices, process)
                return
            notices += line
        raise AssertionError(f"the gateway did not start: {notices}")
    finally:
        process.terminate()
        assert process.stderr is not None
        process.stderr.close()
        process.wait(timeout=60)


@pytest.fixture(scope="session")
def gateway() -> Iterator[RunningGateway]:
    with run_gateway() as running:
        yield running


@pytest.fixture
def site() -> Iterator[LocalSite]:
    with serve_site() as served:
        yield served


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port of loopback on which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]
