"""DirectGateway follows redirects, and checks every hop like the first (SPEC 8.2)."""

from __future__ import annotations

import pytest
import trio

from conveyor.domain.model import FailureReason, Method
from conveyor.engines.http.direct import DirectGateway
from conveyor.ports.gateway import NotScraped, Scraped
from tests.engines.http.conftest import a_request
from tests.net.server import Peer, answering, by_path, raw_server, reply


def redirect(location: str, status: str = "302 Found") -> bytes:
    return reply(b"moved", status, {"Location": location})


async def test_redirects_are_followed_five_times(gateway: DirectGateway) -> None:
    hops = {f"/{number}": redirect(f"/{number + 1}") for number in range(5)}
    async with raw_server(by_path({**hops, "/5": reply(b"there")})) as server:
        outcome = await gateway.scrape(a_request(server.url("/0")))

    assert isinstance(outcome, Scraped)
    assert outcome.body == b"there"
    assert server.connections == 1


async def test_a_loop_of_redirects_ends(gateway: DirectGateway) -> None:
    async with raw_server(answering(redirect("/again"))) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.problem.code) == (FailureReason.BAD_TARGET, "bad_redirect")
    assert not outcome.retryable
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("status", "method"),
    [(301, b"GET"), (302, b"GET"), (303, b"GET"), (307, b"POST"), (308, b"POST")],
)
async def test_a_redirected_post_changes_its_method_as_the_status_says(
    gateway: DirectGateway, status: int, method: bytes
) -> None:
    answers = by_path({"/a": redirect("/b", f"{status} Go"), "/b": reply(b"ok")})
    async with raw_server(answers) as server:
        await gateway.scrape(
            a_request(
                server.url("/a"), method=Method.POST, body=b"form", body_content_type="text/x"
            )
        )

    assert server.requests[1].startswith(method + b" /b ")
    assert server.requests[1].endswith(b"form") is (method == b"POST")
    assert (b"text/x" in server.requests[1]) is (method == b"POST")


async def test_credentials_stay_with_the_origin_they_were_meant_for(
    gateway: DirectGateway,
) -> None:
    headers = {"Authorization": "CANARY", "Cookie": "CANARY", "X-Other": "kept"}
    async with (
        raw_server(answering(reply(b"ok"))) as other,
        raw_server(answering(redirect(other.url("/x")))) as server,
    ):
        outcome = await gateway.scrape(a_request(server.url(), headers=headers))

    assert isinstance(outcome, Scraped)
    assert server.requests[0].count(b"CANARY") == 2
    assert b"CANARY" not in other.requests[0]
    assert b"X-Other: kept" in other.requests[0]


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "//169.254.169.254/",
        "http://[::ffff:a9fe:a9fe]/",
        "http://metadata.google.internal/",
        "http://0x7f.1/",
        "http://user@example.com/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "http://2130706433/",
    ],
)
async def test_a_redirect_to_a_forbidden_place_fails_the_task(
    gateway: DirectGateway, location: str
) -> None:
    async with raw_server(answering(redirect(location))) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, NotScraped)
    assert outcome.reason is FailureReason.BAD_TARGET
    assert outcome.problem.code in {"forbidden_target", "bad_redirect"}
    assert not outcome.retryable
    assert len(server.requests) == 1


async def test_a_refresh_header_is_not_followed(gateway: DirectGateway) -> None:
    answer = reply(b"page", headers={"Refresh": "0; url=http://169.254.169.254/"})
    async with raw_server(answering(answer)) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, Scraped)


async def test_the_deadline_covers_all_redirects_together(gateway: DirectGateway) -> None:
    async def handler(peer: Peer) -> None:
        while await peer.request():
            await trio.sleep(0.03)
            await peer.send(redirect("/next"))

    async with raw_server(handler) as server:
        outcome = await gateway.scrape(a_request(server.url(), deadline_s=0.05))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (FailureReason.TIMEOUT, True)
    assert len(server.requests) <= 2
