"""The SSRF guard is applied where the socket is opened (SPEC.md 5.2)."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
import trio

from conveyor.domain.submit.target import Target, TargetPolicy, parse_url
from conveyor.http_client.errors import ConnectFailed, ForbiddenTarget, NameNotResolved
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.resolver import Resolver
from tests.http_client.conftest import TLS, get, target
from tests.http_client.server import answering, raw_server, reply


class Names:
    """A resolver with scripted answers that records the lookups."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        await trio.lowlevel.checkpoint()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Sockets:
    """Records every address that is dialled, and connects to none."""

    def __init__(self) -> None:
        self.dialled: list[tuple[str, int]] = []

    async def __call__(self, address: str, port: int) -> socket.socket:
        self.dialled.append((address, port))
        raise ConnectFailed("connection refused")


@pytest.fixture
def sockets() -> Sockets:
    return Sockets()


FORBIDDEN_URLS = [
    "http://127.0.0.1/",
    "http://0.0.0.0/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[0:0:0:0:0:ffff:a9fe:a9fe]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[2002:a9fe:a9fe::]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.170.2/v2/credentials",
    "http://metadata.google.internal/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://10.0.0.1/",
    "http://127.0.0.1#@good.com/",
    "http://localhost/",
    "http://localhost./",
    "http://foo.localhost/",
    "http://db.svc.cluster.local/",
    "http://printer/",
    "http://example.com:22/",
    "http://example.com:6379/",
]


@pytest.mark.parametrize("url", FORBIDDEN_URLS)
async def test_a_forbidden_target_is_neither_resolved_nor_dialled(
    url: str, sockets: Sockets
) -> None:
    names = Names(["93.184.216.34"])
    pool = HttpPool(TargetPolicy(), lookup=names, connect=sockets, tls=TLS)

    with pytest.raises(ForbiddenTarget):
        await pool.fetch(get(url))

    assert names.asked == []
    assert sockets.dialled == []


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["8.8.8.8", "::ffff:10.0.0.1"],
        ["2606:4700::1111", "fe80::1%eth0"],
        ["fd00:ec2::254"],
        ["8.8.8.8", "::ffff:0:7f00:1"],
        ["2a01::200:5efe:7f00:1"],
        ["100:0:0:1::1"],
        ["not an address"],
    ],
)
async def test_a_name_with_one_forbidden_address_is_refused(
    addresses: list[str], sockets: Sockets
) -> None:
    pool = HttpPool(TargetPolicy(), lookup=Names(addresses), connect=sockets, tls=TLS)

    with pytest.raises(ForbiddenTarget):
        await pool.fetch(get("http://127.0.0.1.nip.io/"))

    assert sockets.dialled == []


async def test_the_checked_address_is_the_one_that_is_dialled(
    sockets: Sockets,
) -> None:
    names = Names(["93.184.216.34"], ["127.0.0.1"])
    pool = HttpPool(TargetPolicy(), lookup=names, connect=sockets, tls=TLS)

    with pytest.raises(ConnectFailed, match="connection refused"):
        await pool.fetch(get("http://rebind.example.com/"))

    assert sockets.dialled == [("93.184.216.34", 80)]
    assert names.asked == ["rebind.example.com"]


async def test_a_name_that_became_private_is_refused_once_its_cached_answer_has_expired(
    autojump_clock: trio.testing.MockClock,
) -> None:
    names = Names(["93.184.216.34"], ["127.0.0.1"])
    resolver = Resolver(TargetPolicy(), names)
    site = target("http://rebind.example.com/")

    assert await resolver.resolve(site) == ("93.184.216.34",)
    await trio.sleep(31)
    with pytest.raises(ForbiddenTarget):
        await resolver.resolve(site)


async def test_addresses_are_tried_in_order(sockets: Sockets) -> None:
    pool = HttpPool(
        TargetPolicy(), lookup=Names(["2606:4700::1111", "1.1.1.1"]), connect=sockets, tls=TLS
    )

    with pytest.raises(ConnectFailed, match="connection refused"):
        await pool.fetch(get("http://example.com/"))

    assert sockets.dialled == [("2606:4700::1111", 80), ("1.1.1.1", 80)]


async def test_concurrent_resolutions_of_one_name_share_one_lookup() -> None:
    names = Names(["1.1.1.1"])
    resolver = Resolver(TargetPolicy(), names)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(resolver.resolve, target("https://example.com/"))

    assert names.asked == ["example.com"]


async def test_concurrent_resolutions_of_an_unknown_name_share_one_lookup_and_its_error() -> None:
    names = Names(socket.gaierror(socket.EAI_AGAIN, "later"))
    resolver = Resolver(TargetPolicy(), names)
    failures: list[NameNotResolved] = []

    async def ask() -> None:
        with pytest.raises(NameNotResolved) as caught:
            await resolver.resolve(target("https://example.com/"))
        failures.append(caught.value)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)

    assert names.asked == ["example.com"]
    assert [failure.is_temporary for failure in failures] == [True] * 10


async def test_a_cancelled_resolution_does_not_cancel_that_of_others() -> None:
    names = Names(["1.1.1.1"])
    resolver = Resolver(TargetPolicy(), names)
    site = target("https://example.com/")
    with trio.CancelScope() as scope:
        scope.cancel()
        await resolver.resolve(site)

    assert await resolver.resolve(site) == ("1.1.1.1",)


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conveyor.http_client.resolver.CACHE_NAMES_MAX", 40)
    resolver = Resolver(TargetPolicy(), Names(["1.1.1.1"]))
    for number in range(50):
        await resolver.resolve(target(f"https://h{number}.example.com/"))

    assert len(resolver._answers) == 40
    assert resolver._pending == {}


@pytest.mark.parametrize(
    ("error", "is_temporary"),
    [
        (socket.gaierror(socket.EAI_NONAME, "no"), False),
        (socket.gaierror(socket.EAI_AGAIN, "later"), True),
        (OSError("broken"), True),
    ],
)
async def test_a_name_that_does_not_exist_is_distinguished_from_a_failed_lookup(
    error: Exception, is_temporary: bool
) -> None:
    resolver = Resolver(TargetPolicy(), Names(error))

    with pytest.raises(NameNotResolved) as caught:
        await resolver.resolve(target("https://gone.example.com/"))

    assert caught.value.is_temporary is is_temporary


async def test_the_system_resolver_resolves_a_real_name() -> None:
    resolver = Resolver(TargetPolicy(allow_private=True))

    assert "127.0.0.1" in await resolver.resolve(target("http://localhost/"))


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "http://metadata.google.internal/", "http://[ff02::1]/"]
)
async def test_metadata_services_are_forbidden_although_private_targets_are_allowed(
    url: str, sockets: Sockets
) -> None:
    pool = HttpPool(
        TargetPolicy(allow_private=True), lookup=Names(["127.0.0.1"]), connect=sockets, tls=TLS
    )

    with pytest.raises(ForbiddenTarget):
        await pool.fetch(get(url))

    assert sockets.dialled == []


async def test_the_host_header_has_the_name_and_the_socket_the_checked_address() -> None:
    names = Names(["127.0.0.1"])
    pool = HttpPool(TargetPolicy(allow_private=True), lookup=names, tls=TLS)
    async with raw_server(answering(reply(b"hi"))) as server:
        response = await pool.fetch(get(f"http://site.example.com:{server.port}/"))
        pool.close()

    assert response.body == b"hi"
    assert f"\r\nHost: site.example.com:{server.port}\r\n".encode() in server.requests[0]


def test_every_forbidden_url_is_valid_so_that_the_policy_refuses_it() -> None:
    assert all(isinstance(parse_url(url), Target) for url in FORBIDDEN_URLS)
