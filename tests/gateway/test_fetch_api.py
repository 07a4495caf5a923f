"""The fetch API, driven by the published client (docs/gateway.md, Answers)."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from zenrows import ZenRowsClient

from conveyor.domain import limits
from conveyor.gateway.errors import Fault
from tests.e2e.programs import until
from tests.gateway.conftest import KEY, RunningGateway, needs_chromium, run_gateway
from tests.gateway.site import LocalSite

pytestmark = pytest.mark.slow

T = TypeVar("T")
WAITS_TOO_LONG = "[" + ",".join(['{"wait": 30000}'] * 5) + "]"


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[ZenRowsClient]:
    with ZenRowsClient(KEY, base_url=gateway.url) as opened:
        yield opened


@needs_chromium
def test_the_published_client_gets_plain_and_rendered_pages(
    client: ZenRowsClient, site: LocalSite
) -> None:
    plain = client.get(f"{site.url}/")
    rendered = client.get(f"{site.url}/", params={"js_render": "true", "wait_for": ".product"})

    assert (plain.status_code, "thing 3" in plain.text) == (200, False)
    assert (rendered.status_code, "thing 3" in rendered.text) == (200, True)
    for answer in (plain, rendered):
        assert answer.headers["X-Request-Cost"] == "0"
        assert int(answer.headers["Concurrency-Limit"]) > 0
        assert int(answer.headers["Concurrency-Remaining"]) >= 0
        assert answer.headers["X-Request-Id"]
        assert answer.headers["Zr-Final-Url"] == f"{site.url}/"


@needs_chromium
async def test_the_published_client_works_asynchronously(
    client: ZenRowsClient, site: LocalSite
) -> None:
    import trio

    async def scenario() -> list[str]:
        answers = await asyncio.gather(
            *(client.get_async(f"{site.url}/", params={"js_render": "true"}) for _ in range(2)),
            client.post_async(f"{site.url}/echo", data={"name": "Anna"}),
        )
        return [answer.text for answer in answers]

    first, second, posted = await trio.to_thread.run_sync(_run, scenario())

    assert "thing 3" in first
    assert "thing 3" in second
    assert posted == "name=Anna"


def test_a_body_and_headers_reach_the_site(client: ZenRowsClient, site: LocalSite) -> None:
    posted = client.post(f"{site.url}/echo", data="raw", headers={"X-Mark": "1"})
    put = client.put(f"{site.url}/echo", data="changed")

    assert (posted.text, put.text) == ("raw", "changed")
    assert [request.method for request in site.requests] == ["POST", "PUT"]
    assert site.requests[0].headers["x-mark"] == "1"
    assert "x-mark" not in site.requests[1].headers


@pytest.mark.parametrize(
    ("url", "params", "status", "code"),
    [
        ("{site}/missing", {}, 404, "RESP002"),
        ("{site}/broken", {}, 422, "RESP001"),
        ("http://127.0.0.1:{closed}/", {}, 422, "RESP001"),
        ("http://169.254.169.254/", {}, 400, "REQS001"),
        ("http://name.invalid/", {}, 404, "RESP007"),
        ("ftp://example.com/", {}, 400, "REQS004"),
        ("{site}/", {"unknown": "1"}, 400, "REQS004"),
        ("{site}/", {"wait": "1000"}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "wait": "31000"}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "js_instructions": '[{"dance": 1}]'}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "js_instructions": WAITS_TOO_LONG}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "block_resources": "wishes"}, 400, "REQS004"),
        ("{site}/", {"css_extractor": '{"a": "//p[re:test(., 1)]"}'}, 400, "REQS004"),
        ("{site}/", {"css_extractor": '{"a": "//p[. = $b]"}'}, 400, "REQS004"),
        ("{site}/", {"js_render": "perhaps"}, 400, "REQS004"),
        ("{site}/", {"premium_proxy": "perhaps"}, 400, "REQS004"),
        ("{site}/", {"custom_headers": "perhaps"}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "screenshot": "perhaps"}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "screenshot_format": "jpeg"}, 400, "REQS004"),
        ("{site}/", {"js_render": "true", "screenshot_quality": "9"}, 400, "REQS004"),
        ("{site}/", {"window_width": "800"}, 400, "REQS004"),
        (
            "{site}/",
            {"js_render": "true", "response_type": "pdf", "screenshot": "true"},
            400,
            "REQS004",
        ),
        (
            "{site}/",
            {"js_render": "true", "response_type": "pdf", "json_response": "true"},
            400,
            "REQS004",
        ),
    ],
)
def test_failures_have_the_codes_of_the_api(
    client: ZenRowsClient, site: LocalSite, url: str, params: dict[str, str], status: int, code: str
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = url.format(site=site.url, closed=unused.getsockname()[1])

        answers = [
            client.fetch(address, params=params),
            _run(client.fetch_async(address, params=params)),
        ]

    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_blank_key_is_no_key(gateway: RunningGateway, site: LocalSite) -> None:
    with ZenRowsClient(" ", base_url=gateway.url) as client:
        answers = _ask_both_ways(client, f"{site.url}/")
    without = httpx.get(gateway.url, params={"url": f"{site.url}/"})

    assert codes_of(answers) == {(401, "AUTH001")}
    assert (without.status_code, without.json()["code"]) == (401, "AUTH001")
    assert site.requests == []


@pytest.mark.parametrize(
    "params", [{}, {"mode": "auto"}, pytest.param({"js_render": "true"}, marks=needs_chromium)]
)
def test_a_page_above_the_limit_is_too_large(
    client: ZenRowsClient, site: LocalSite, params: dict[str, str]
) -> None:
    html = b"<p>" + b"x" * limits.BODY_BYTES_MAX
    site.pages["/large"] = (200, {"Content-Type": "text/html"}, html)

    answers = _ask_both_ways(client, f"{site.url}/large", params)

    assert codes_of(answers) == {(413, "RESP005")}
    assert client.get(f"{site.url}/").status_code == 200


@needs_chromium
def test_a_page_that_never_loads_takes_too_long(client: ZenRowsClient, site: LocalSite) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        script = f'<p>wait</p><script src="http://127.0.0.1:{silent.getsockname()[1]}/"></script>'
        site.pages["/slow"] = (200, {"Content-Type": "text/html"}, script.encode())

        answers = _ask_both_ways(client, f"{site.url}/slow", {"js_render": "true"})

    assert codes_of(answers) == {(504, "CTX0002")}


def test_a_gateway_without_a_free_descriptor_has_no_room_until_it_has_one(
    site: LocalSite, unused_port: int
) -> None:
    with run_gateway() as running, ZenRowsClient(KEY, base_url=running.url) as client:
        # Their connection stays open, so that only the one to the site needs a descriptor.
        client.get(f"{site.url}/")
        usual = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (3, usual[1]))
        answers = _ask_both_ways(client, f"http://127.0.0.1:{unused_port}/", at_once=False)
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, usual)
        again = client.get(f"{site.url}/moved")

    assert codes_of(answers) == {(503, "ERR0000")}
    assert {answer.headers["Retry-After"] for answer in answers} == {"5"}
    assert again.status_code == 200


def test_a_browser_that_ends_again_and_again_is_a_failure_of_the_gateway(
    site: LocalSite, tmp_path: Path
) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with (
        run_gateway(CONVEYOR_CHROMIUM=str(program)) as running,
        ZenRowsClient(KEY, base_url=running.url) as client,
    ):
        answers = _ask_both_ways(client, f"{site.url}/", {"js_render": "true"})
        plain = client.get(f"{site.url}/")

    assert codes_of(answers) == {(500, "ERR0001")}
    assert plain.status_code == 200


def test_each_code_of_the_documents_is_one_of_the_gateway() -> None:
    table = Path("docs/gateway.md").read_text().partition("| code | status |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    documented = {code for row in rows for code in re.findall(r"`([A-Z]+\d+)`", row.split("|")[1])}

    assert documented == {fault.code for fault in Fault}


@needs_chromium
def test_a_stopping_gateway_finishes_its_calls_and_takes_no_more(site: LocalSite) -> None:
    with (
        run_gateway(CONVEYOR_DRAIN_S="30") as running,
        ZenRowsClient(KEY, base_url=running.url) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        client.get(f"{site.url}/", params={"js_render": "true"})
        # Longer than a load balancer needs to notice, and than a request of the API has to end.
        params = {"js_render": "true", "js_instructions": '[{"wait": 14000}]'}
        call = threads.submit(client.get, f"{site.url}/", params=params)
        while site.paths().count("/") < 2:
            time.sleep(0.05)
        running.process.terminate()
        origin = running.url.removesuffix("/v1/")
        until("readiness to end", lambda: httpx.get(f"{origin}/readyz").status_code == 503 or None)
        until("the port to close", lambda: _is_refused(origin) or None, deadline_s=15)
        is_under_way = not call.done()
        page = call.result(timeout=60)
        status = running.process.wait(timeout=15)

    assert is_under_way
    assert (page.status_code, "thing 19" in page.text) == (200, True)
    assert status == 0


def test_a_stopping_gateway_answers_calls_that_take_too_long() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        run_gateway(CONVEYOR_DRAIN_S="6") as running,
        ThreadPoolExecutor(1) as threads,
    ):
        call = threads.submit(running.get, f"http://127.0.0.1:{silent.getsockname()[1]}/")
        accepted, _ = silent.accept()
        began_at = time.monotonic()
        running.process.terminate()
        answer = call.result(timeout=60)
        running.process.wait(timeout=15)
        seconds = time.monotonic() - began_at
        accepted.close()

    assert (answer.status_code, answer.json()["code"]) == (503, "ERR0000")
    assert "stopping" in answer.json()["detail"]
    assert answer.headers["retry-after"] == "1"

    assert 5 < seconds < 15


def test_the_clients_extraction_by_ai_is_refused_with_what_there_is_instead(
    client: ZenRowsClient, site: LocalSite
) -> None:
    answers = [client.extract(f"{site.url}/"), _run(client.extract_async(f"{site.url}/"))]

    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (400, "REQS004")
        assert "css_extractor" in answer.json()["detail"]
    assert site.requests == []


@needs_chromium
def test_an_invalid_selector_of_a_screenshot_is_a_mistake_of_the_caller(
    client: ZenRowsClient, site: LocalSite
) -> None:
    codes = [
        client.get(f"{site.url}/", params={"js_render": "true", "screenshot_selector": selector})
        for selector in ("[", ".none")
    ]

    assert [answer.json()["code"] for answer in codes] == ["REQS004", "RESP001"]


def test_what_is_switched_off_asks_for_nothing(client: ZenRowsClient, site: LocalSite) -> None:
    off = {"js_render": "false", "screenshot": "0", "autoparse": "false", "premium_proxy": "false"}
    answer = client.get(f"{site.url}/", params=off)

    assert (answer.status_code, answer.content) == (200, site.pages["/"][2])


def test_a_post_is_not_rendered(client: ZenRowsClient, site: LocalSite) -> None:
    answer = client.post(f"{site.url}/echo", params={"js_render": "true"}, data="x")

    assert (answer.status_code, answer.json()["code"]) == (400, "REQS004")
    assert site.requests == []


def test_keys_of_a_list_and_the_limit_of_calls(site: LocalSite) -> None:
    keys = {"CONVEYOR_AUTH": "keys", "CONVEYOR_API_KEYS": KEY, "CONVEYOR_GATEWAY_CALLS": "1"}
    with run_gateway(**keys) as limited, ZenRowsClient(KEY, base_url=limited.url) as client:
        with ZenRowsClient("another-key-123456", base_url=limited.url) as stranger:
            refused = stranger.get(f"{site.url}/")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            waiting = f"http://127.0.0.1:{silent.getsockname()[1]}/"

            async def scenario() -> tuple[int, str]:
                first = asyncio.create_task(client.get_async(waiting))
                accepted, _ = await asyncio.to_thread(silent.accept)
                second = await client.get_async(f"{site.url}/")
                accepted.close()
                await first
                return second.status_code, second.json()["code"]

            second = _run(scenario())

    assert (refused.status_code, refused.json()["code"]) == (401, "AUTH002")
    assert second == (429, "AUTH006")


def test_a_gateway_without_a_browser_says_so_and_fetches_plainly(
    site: LocalSite, tmp_path: Path
) -> None:
    nowhere = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": ""}
    with run_gateway(**nowhere) as plain:
        fetched = plain.get(f"{site.url}/")
        refused = plain.render(f"{site.url}/")

    assert "apt install chromium" in plain.notices
    assert fetched.status_code == 200
    assert (refused.status_code, refused.json()["code"]) == (400, "REQS004")
    assert "apt install chromium" in refused.json()["detail"]


def test_a_browser_that_is_named_and_missing_is_an_error() -> None:
    with (
        pytest.raises(AssertionError, match="CONVEYOR_CHROMIUM: there is no program /no/such"),
        run_gateway(CONVEYOR_CHROMIUM="/no/such"),
    ):
        pass


def _ask_both_ways(
    client: ZenRowsClient, url: str, params: dict[str, str] | None = None, *, at_once: bool = True
) -> list[Any]:
    """Fetches with the method for threads and with the one for asyncio."""

    async def scenario() -> list[Any]:
        if not at_once:
            return [client.fetch(url, params=params), await client.fetch_async(url, params=params)]
        both = await asyncio.gather(
            asyncio.to_thread(client.fetch, url, params=params),
            client.fetch_async(url, params=params),
        )
        return list(both)

    return _run(scenario())


def codes_of(answers: list[Any]) -> set[tuple[int, str]]:
    return {(answer.status_code, answer.json()["code"]) for answer in answers}


def _is_refused(origin: str) -> bool:
    try:
        httpx.get(f"{origin}/readyz")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass  # It was accepted just before the port closed.
    return False


def _run(scenario: Coroutine[Any, Any, T]) -> T:
    """Runs it on a loop of asyncio itself. trio-asyncio, which other tests import, would give it
    one that runs on Trio."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(scenario)
