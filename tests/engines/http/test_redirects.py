"""DirectGateway follows redirects, and checks every hop like the first (SPEC.md 5.2)."""

from __future__ import annotations

import msgspec
import pytest
import trio

from conveyor.domain.model import FailureReason, Method
from conveyor.engines.http.direct import DirectGateway
from conveyor.http_client.errors import BadRedirect
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import next_request, public_headers
from conveyor.ports.gateway import NotScraped, Scraped
from tests.engines.http.conftest import a_request
from tests.http_client.conftest import target
from tests.http_client.server import Peer, answering, by_path, raw_server, reply


def redirect(location: str, status: str = "302 Found") -> bytes:
    return reply(b"moved", status, {"Location": location})


async def test_redirects_are_followed_five_times(gateway: DirectGateway) -> None:
    hops = {f"/{number}": redirect(f"/{number + 1}") for number in range(5)}
    async with raw_server(by_path({**hops, "/5": reply(b"there")})) as server:
        outcome = await gateway.scrape(a_request(server.url("/0")))

    assert isinstance(outcome, Scraped)
    assert outcome.body == b"there"
    assert server.connections == 1


async def test_a_redirect_loop_ends(gateway: DirectGateway) -> None:
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
async def test_a_redirected_post_changes_its_method_as_its_status_requires(
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


@pytest.mark.parametrize(
    ("status", "method", "next_method"),
    [
        (301, "HEAD", b"HEAD"),
        (303, "HEAD", b"HEAD"),
        (301, "PUT", b"PUT"),
        (302, "DELETE", b"DELETE"),
        (303, "PUT", b"GET"),
        (308, "PATCH", b"PATCH"),
    ],
)
async def test_only_a_303_changes_the_other_methods(
    gateway: DirectGateway, status: int, method: str, next_method: bytes
) -> None:
    answers = by_path({"/a": redirect("/b", f"{status} Go"), "/b": reply(b"")})
    async with raw_server(answers) as server:
        await gateway.scrape(a_request(server.url("/a"), method=method))

    assert [request.split(b" ")[0] for request in server.requests] == [
        method.encode(),
        next_method,
    ]


SECRETS = {
    "Authorization": "CANARY",
    "Cookie": "CANARY",
    "Cookie2": "CANARY",
    "X-Api-Key": "CANARY",
    "X-Amz-Security-Token": "CANARY",
    "X-Whatever": "CANARY",
    "Content-Language": "CANARY",
    "Origin": "https://CANARY",
    "Forwarded": "for=CANARY",
    "Referer": "http://from.example.com/CANARY?token=CANARY",
}
PUBLIC = {"User-Agent": "a browser", "Accept": "text/html", "accept-language": "de"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_custom_headers_are_not_sent_to_another_origin(
    gateway: DirectGateway, status: int
) -> None:
    async with (
        raw_server(answering(reply(b"ok"))) as other,
        raw_server(answering(redirect(other.url("/x"), f"{status} Go"))) as server,
    ):
        request = a_request(server.url(), headers={**SECRETS, **PUBLIC})
        outcome = await gateway.scrape(request)

    assert isinstance(outcome, Scraped)
    assert server.requests[0].count(b"CANARY") == len(SECRETS) + 1
    assert b"CANARY" not in other.requests[0]
    for name, value in {**PUBLIC, "Referer": "http://from.example.com/"}.items():
        assert f"{name}: {value}\r\n".encode() in other.requests[0]


async def test_custom_headers_are_sent_within_one_origin(gateway: DirectGateway) -> None:
    answers = by_path({"/a": redirect("/b"), "/b": reply(b"ok")})
    async with raw_server(answers) as server:
        await gateway.scrape(a_request(server.url("/a"), headers=SECRETS))

    assert server.requests[1].count(b"CANARY") == len(SECRETS) + 1


async def test_custom_headers_are_not_sent_again_after_a_redirect_back_from_another_origin(
    gateway: DirectGateway,
) -> None:
    there = trio.Event()
    homes: list[str] = []

    async def away(peer: Peer) -> None:
        while await peer.request():
            await peer.send(redirect(homes[0]))

    async def home(peer: Peer) -> None:
        while await peer.request():
            is_back = there.is_set()
            there.set()
            await peer.send(reply(b"ok") if is_back else redirect(other.url("/x")))

    async with raw_server(away) as other, raw_server(home) as server:
        homes.append(server.url("/again"))
        outcome = await gateway.scrape(a_request(server.url(), headers=SECRETS))

    assert isinstance(outcome, Scraped)
    assert b"CANARY" not in server.requests[1]


@pytest.mark.parametrize("status", [307, 308])
async def test_a_body_is_never_sent_to_another_origin(gateway: DirectGateway, status: int) -> None:
    async with (
        raw_server(answering(reply(b"ok"))) as other,
        raw_server(answering(redirect(other.url("/x"), f"{status} Go"))) as server,
    ):
        outcome = await gateway.scrape(
            a_request(server.url(), method=Method.POST, body=b"CANARY", body_content_type="text/x")
        )

    assert isinstance(outcome, NotScraped)
    assert (outcome.problem.code, outcome.retryable) == ("bad_redirect", False)
    assert other.requests == []


@pytest.mark.parametrize(
    ("referer", "source", "there", "expected"),
    [
        (
            "https://a.example/x?k=1",
            "https://a.example/",
            "https://b.example/",
            "https://a.example/",
        ),
        ("http://a.example/x?k=1", "https://a.example/", "http://a.example/", None),
        ("https://a.example/x", "http://a.example/", "http://b.example/", None),
        ("https://me:secret@a.example/", "https://a.example/", "https://b.example/", None),
        ("secret", "https://a.example/", "https://b.example/", None),
    ],
)
def test_another_origin_receives_only_the_origin_of_a_referer(
    referer: str, source: str, there: str, expected: str | None
) -> None:
    headers = (("Referer", referer), ("X-Key", "secret"))

    forwarded = public_headers(headers, target(source), target(there))

    assert forwarded == ((("Referer", expected),) if expected else ())


def test_a_downgrade_on_one_host_drops_headers_and_refuses_a_body() -> None:
    headers = (("X-Key", "secret"), ("User-Agent", "a browser"))
    source, there = target("https://a.example/"), target("http://a.example/")

    request = Request(method=Method.GET, target=source, headers=headers)

    following = next_request(request, there, 302, deadline_s=1.0)

    assert following.headers == (("User-Agent", "a browser"),)
    posted = msgspec.structs.replace(request, method=Method.POST, body=b"secret")
    with pytest.raises(BadRedirect):
        next_request(posted, there, 307, deadline_s=1.0)


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
async def test_a_redirect_to_a_forbidden_target_fails_the_task(
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
