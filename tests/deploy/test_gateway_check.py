"""Tests what `conveyor check` reports of its own gateway and of a configured one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conveyor.bootstrap.gateway_check import check_gateway, check_remote_gateway
from conveyor.config import settings_from
from tests.gateway.conftest import needs_chromium
from tests.servers import free_port


@contextmanager
def a_server(status: int) -> Iterator[str]:
    """Runs a server that answers every request with this status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/"
        server.shutdown()
        thread.join()


async def check_remote(variable: str, url: str) -> list[tuple[str, str | None]]:
    findings = await check_remote_gateway(settings_from({variable: url}))
    return [(finding.name, finding.problem) for finding in findings]


async def test_no_gateway_is_checked_if_none_is_configured() -> None:
    assert await check_remote_gateway(settings_from({})) == []


@pytest.mark.parametrize("variable", ["CONVEYOR_GATEWAY_URL", "CONVEYOR_RENDERER_URL"])
async def test_a_gateway_that_asks_for_a_url_passes_the_check(variable: str) -> None:
    with a_server(400) as url:
        findings = await check_remote(variable, f"{url}?apikey=k")

    assert findings == [("gateway", None)]


async def test_a_key_that_the_gateway_refuses_is_reported() -> None:
    with a_server(401) as url:
        findings = await check_remote("CONVEYOR_RENDERER_URL", f"{url}?apikey=k")

    assert findings == [("gateway", "127.0.0.1 refuses the key")]


async def test_a_gateway_that_needs_the_keys_of_callers_passes_the_check() -> None:
    with a_server(401) as url:
        findings = await check_remote("CONVEYOR_GATEWAY_URL", url)

    assert findings == [("gateway", None)]


async def test_a_gateway_that_does_not_answer_is_reported() -> None:
    findings = await check_remote("CONVEYOR_GATEWAY_URL", f"http://127.0.0.1:{free_port()}/v1/")

    assert findings == [("gateway", "127.0.0.1 does not answer: connection refused")]


@needs_chromium
@pytest.mark.slow
async def test_the_check_starts_chromium() -> None:
    (finding,) = await check_gateway(settings_from({}))

    assert (finding.name, finding.problem) == ("Chromium", None)


async def test_a_chromium_that_ends_is_reported_with_its_remedy() -> None:
    (finding,) = await check_gateway(settings_from({"CONVEYOR_CHROMIUM": "/bin/true"}))

    assert finding.problem == "/bin/true does not start"
    assert "CONVEYOR_CHROMIUM_SANDBOX=off" in finding.remedy


async def test_proxies_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    (tmp_path / "proxies").write_text("no proxy\n")
    environ = {
        "CONVEYOR_CHROMIUM": "/nonexistent",
        "CONVEYOR_GATEWAY_PROXIES": str(tmp_path / "proxies"),
    }

    chromium, proxies = await check_gateway(settings_from(environ))

    assert chromium.problem == "pages cannot be rendered"
    assert proxies.problem is not None
    assert "CONVEYOR_GATEWAY_PROXIES" in proxies.remedy
