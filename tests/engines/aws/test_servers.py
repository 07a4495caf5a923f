"""The local servers that other tests use start and answer."""

from __future__ import annotations

import httpx
import pytest

from tests.servers import redis_says

pytestmark = pytest.mark.slow


def port_of(url: str) -> int:
    port = httpx.URL(url).port
    assert port is not None
    return port


def test_a_single_redis_accepts_keys_of_different_slots(redis: str) -> None:
    assert redis_says(port_of(redis), "MSET", "a", "1", "b", "2") == b"+OK\r\n"


def test_a_redis_cluster_refuses_keys_of_different_slots(redis_cluster: str) -> None:
    said = redis_says(port_of(redis_cluster), "MSET", "a", "1", "b", "2")

    assert said.startswith(b"-CROSSSLOT")


def test_the_moto_server_answers_http(moto: str) -> None:
    assert httpx.get(f"{moto}/moto-api/").status_code == 200
