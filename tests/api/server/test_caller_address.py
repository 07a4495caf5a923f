"""Where links point, and whose address a request comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from conveyor.api.server.app import make_app
from conveyor.api.server.auth import Origins, Passthrough, parse_networks
from conveyor.telemetry import make_metrics
from tests.api.world import SECRET, World

PROXIED = Origins(proxies=parse_networks("10.0.0.0/8, 2001:db8::1"))
STRANGER, PROXY = "203.0.113.5", "10.1.2.3"


def scope_of(
    headers: Mapping[str, str], *, peer: str = STRANGER, server: tuple[str, int] = ("192.0.2.1", 80)
) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": pairs, "client": (peer, 5000), "server": server}


@pytest.mark.parametrize(
    ("host", "base_url"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("192.0.2.1:8080", "http://192.0.2.1:8080"),
        ("192.0.2.1:8081", "http://192.0.2.1:8080"),
        ("192.0.2.2:8080", "http://192.0.2.1:8080"),
        ("evil.test", "http://192.0.2.1:8080"),
        ("localhost.evil.test", "http://192.0.2.1:8080"),
        ("127.0.0.1.evil.test", "http://192.0.2.1:8080"),
        ("", "http://192.0.2.1:8080"),
    ],
)
def test_a_host_header_counts_only_where_it_names_this_machine(host: str, base_url: str) -> None:
    scope = scope_of({"Host": host}, server=("192.0.2.1", 8080))

    assert Origins().find_base_url(scope) == base_url


FORWARDED = {
    "Host": "inner.test",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "scrape.example",
    "X-Forwarded-For": "198.51.100.7",
}


def test_forwarded_headers_of_a_stranger_are_ignored() -> None:
    scope = scope_of({**FORWARDED, "Forwarded": "for=1.2.3.4;host=evil.test;proto=https"})

    assert PROXIED.find_base_url(scope) == "http://192.0.2.1:80"
    assert PROXIED.find_client_address(scope) == STRANGER


@pytest.mark.parametrize(
    ("headers", "base_url"),
    [
        (FORWARDED, "https://scrape.example"),
        ({"Host": "inner.test", "X-Forwarded-Proto": "https"}, "https://inner.test"),
        ({"Host": "inner.test"}, "http://inner.test"),
        ({**FORWARDED, "X-Forwarded-Host": "evil.test, real.example"}, "https://real.example"),
        ({**FORWARDED, "X-Forwarded-Proto": "javascript"}, "http://scrape.example"),
        ({**FORWARDED, "X-Forwarded-Host": "a/b"}, "http://192.0.2.1:80"),
        (
            {"Host": "i", "Forwarded": 'for=1.2.3.4, for="[2001:db8::9]";proto=https;host=f.test'},
            "https://f.test",
        ),
    ],
)
def test_a_trusted_proxy_says_how_it_was_reached(headers: Mapping[str, str], base_url: str) -> None:
    assert PROXIED.find_base_url(scope_of(headers, peer=PROXY)) == base_url


def test_the_public_url_outranks_every_header() -> None:
    origins = Origins(public_url="https://scrape.example/api", proxies=PROXIED.proxies)

    assert origins.find_base_url(scope_of(FORWARDED, peer=PROXY)) == "https://scrape.example/api"


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        ({"X-Forwarded-For": "198.51.100.7"}, "198.51.100.7"),
        ({"X-Forwarded-For": "1.1.1.1, 198.51.100.7, 10.9.9.9"}, "198.51.100.7"),
        ({"X-Forwarded-For": "198.51.100.7:4444"}, "198.51.100.7"),
        ({"X-Forwarded-For": "nonsense, 10.9.9.9"}, "10.9.9.9"),
        ({"X-Forwarded-For": "::ffff:198.51.100.7"}, "198.51.100.7"),
        ({"Forwarded": 'for="[2001:db8:1::7]:99";by=x, for=10.0.0.1'}, "2001:db8:1::7"),
        ({}, PROXY),
    ],
)
def test_the_client_is_the_nearest_address_that_is_no_trusted_proxy(
    headers: Mapping[str, str], address: str
) -> None:
    assert PROXIED.find_client_address(scope_of(headers, peer=PROXY)) == address


async def test_links_begin_with_the_public_url(world: World) -> None:
    app = make_app(
        world.env,
        Passthrough(SECRET),
        notifier=world.receiver,
        metrics=make_metrics(CollectorRegistry()),
        ready=lambda: True,
        origins=Origins(public_url="https://scrape.example"),
    )
    world.app = app
    headers = {"Host": "evil.test", "X-Forwarded-Host": "evil.test"}

    slot = await world.call("POST", "/v1/job_inputs", {"format": "text"}, headers=headers)

    assert slot.json["upload"]["url"].startswith("https://scrape.example/v1/job_inputs/")
    assert "evil.test" not in json.dumps(slot.json)
