"""The fetch API, driven by the published client (docs/gateway.md, Answers)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from zenrows import ZenRowsClient

from tests.gateway.conftest import KEY, RunningGateway, needs_chromium, run_gateway
from tests.gateway.site import LocalSite

pytestmark = pytest.mark.slow

T = TypeVar("T")


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
        ("{site}/", {"js_render": "true", "block_resources": "wishes"}, 400, "REQS004"),
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


def test_the_clients_extraction_by_ai_is_refused_with_what_there_is_instead(
    client: ZenRowsClient, site: LocalSite
) -> None:
    answers = [client.extract(f"{site.url}/"), _run(client.extract_async(f"{site.url}/"))]

    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (400, "REQS004")
        assert "css_extractor" in answer.json()["detail"]
    assert site.requests == []


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


def _run(scenario: Coroutine[Any, Any, T]) -> T:
    """Runs it on a loop of asyncio itself. trio-asyncio, which other tests import, would give it
    one that runs on Trio."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(scenario)
