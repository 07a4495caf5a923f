"""Gateways over a pool that may reach loopback, and requests that show only what matters."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from conveyor.domain.model import Method
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.direct import DirectGateway
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls
from conveyor.ports.gateway import ScrapeRequest

NOW = 1_700_000_000.0
# Loading the certificates takes longer than most of these tests.
TLS = default_tls()


def now() -> float:
    return NOW


@pytest.fixture
def pool() -> Iterator[HttpPool]:
    pool = HttpPool(TargetPolicy(allow_private=True), tls=TLS)
    yield pool
    pool.close()


@pytest.fixture
def gateway(pool: HttpPool) -> DirectGateway:
    return DirectGateway(pool, now=now)


def a_request(url: str, **changes: object) -> ScrapeRequest:
    request = ScrapeRequest(
        url=url,
        method=Method.GET,
        params={},
        headers={},
        body=None,
        body_content_type=None,
        auth=None,
        identity="task/1",
        partition="a caller",
        deadline_s=5.0,
        body_bytes_max=1_000_000,
    )
    return msgspec.structs.replace(request, **changes)
