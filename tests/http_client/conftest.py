"""Pools that may reach loopback, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from conveyor.domain.submit.target import Target, TargetPolicy, parse_url
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls

# With these limits every body above 10 kB counts as large.
ALL_LARGE = {"unreserved_body_bytes": 10_000, "large_body_bytes": 10_000}
MakePool = Callable[..., HttpPool]
# Loading the certificates takes longer than most of these tests.
TLS = default_tls()


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    pools: list[HttpPool] = []

    def make(*, allow_private: bool = True, **limits: float) -> HttpPool:
        policy = TargetPolicy(allow_private=allow_private)
        pool = HttpPool(policy, PoolLimits(**limits), tls=TLS)  # type: ignore[arg-type]
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
        assert pool.idle_count == 0
        assert pool.origin_count == 0


@pytest.fixture
def pool(make_pool: MakePool) -> HttpPool:
    return make_pool()


def target(url: str) -> Target:
    parsed = parse_url(url)
    assert isinstance(parsed, Target), parsed
    return parsed


def get(url: str, **fields: object) -> Request:
    return Request(method="GET", target=target(url), **{"deadline_s": 5.0, **fields})  # type: ignore[arg-type]
