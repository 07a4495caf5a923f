"""A real Redis server: its clock, scripts, slots, and outages."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.ids import LeaseId
from conveyor.engines.redis.cache import RedisCache
from conveyor.engines.redis.connection import DEADLINE_S, CoredisConnection, open_link
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.cache import CachedValue, ReadTicket
from conveyor.ports.coordinator import HostPool
from conveyor.ports.errors import Unavailable
from tests.builders import JOB, OTHER_JOB, RUN
from tests.conformance.coordinators import REDIS_ANSWER_S, a_space
from tests.servers import a_redis, a_redis_cluster, free_port, redis_says

KINDS = ("redis", "redis_cluster")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    address: str = request.getfixturevalue(request.param)
    return address


def a_coordinator(link: CoredisConnection, space: str, seed: int = 1) -> RedisCoordinator:
    return RedisCoordinator(link, Random(seed), space=space, deadline_s=REDIS_ANSWER_S)


def a_cache(link: CoredisConnection) -> RedisCache:
    return RedisCache(link, Random(1), space=a_space(), answer_s=REDIS_ANSWER_S)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def until_free(coordinator: RedisCoordinator, cap: int, ttl_s: float) -> list[LeaseId]:
    with trio.fail_after(10):
        while True:
            if taken := await coordinator.acquire(JOB, RUN, count_max=1, cap=cap, ttl_s=ttl_s):
                return taken
            await trio.sleep(0.01)
    raise AssertionError


@pytest.mark.slow
async def test_a_lease_ages_out_by_the_servers_clock(url: str) -> None:
    async with open_link(url) as link:
        coordinator = a_coordinator(link, a_space())
        [old] = await coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=0.2)

        [new] = await until_free(coordinator, cap=1, ttl_s=30)

        assert await coordinator.renew([old, new], ttl_s=30) == frozenset({old})
        assert await coordinator.count(RUN) == 1


@settings(max_examples=15)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 5), st.booleans()), min_size=1, max_size=12
    ),
    cap=st.integers(1, 6),
)
def test_two_processes_together_never_hold_more_than_the_cap(
    redis: str, turns: list[tuple[int, int, bool]], cap: int
) -> None:
    async def take_turns() -> None:
        space = a_space()
        async with open_link(redis) as one, open_link(redis) as other:
            both = [a_coordinator(one, space, 1), a_coordinator(other, space, 2)]
            held: set[LeaseId] = set()

            async def turn(who: int, count_max: int, gives_back: bool) -> None:
                taken = await both[who].acquire(JOB, RUN, count_max=count_max, cap=cap, ttl_s=30)
                held.update(taken)
                assert len(held) <= cap
                if gives_back:
                    # The lease is removed from the list first, because another process may take its
                    # place at once.
                    held.difference_update(taken)
                    await both[1 - who].release(taken)

            async with trio.open_nursery() as nursery:
                for turn_taker in turns:
                    nursery.start_soon(turn, *turn_taker)
            assert await both[0].count(RUN) == len(held)

    trio.run(take_turns)


async def test_scripts_are_loaded_again_after_the_server_lost_them(url: str) -> None:
    async with open_link(url) as link:
        coordinator = a_coordinator(link, a_space())
        await coordinator.acquire(JOB, RUN, count_max=1, cap=5, ttl_s=30)
        assert redis_says(port_of(url), "SCRIPT", "FLUSH") == b"+OK\r\n"

        taken = await coordinator.acquire(JOB, RUN, count_max=1, cap=5, ttl_s=30)

        assert len(taken) == 1
        assert await coordinator.count(RUN) == 2


async def test_leases_of_many_jobs_and_hosts_are_renewed_in_one_call(url: str) -> None:
    async with open_link(url) as link:
        coordinator = a_coordinator(link, a_space())
        leases = [
            *await coordinator.acquire(JOB, RUN, count_max=3, cap=9, ttl_s=30),
            *await coordinator.acquire(OTHER_JOB, RUN, count_max=3, cap=9, ttl_s=30),
        ]
        pools = [
            HostPool(JOB, "a.test", 2),
            HostPool(OTHER_JOB, "a.test", 2),
            HostPool(JOB, "b.test", 2),
        ]
        leases += [
            host for host in await coordinator.acquire_hosts(pools, ttl_s=30) if host is not None
        ]
        await coordinator.release(leases[::4])

        assert await coordinator.renew(leases, ttl_s=30) == frozenset(leases[::4])


async def test_the_leases_of_a_run_are_counted_although_the_server_lost_its_data(
    tmp_path: Path,
) -> None:
    with a_redis(tmp_path) as url:
        async with open_link(url) as link:
            coordinator = a_coordinator(link, a_space())
            await coordinator.acquire(JOB, RUN, count_max=2, cap=5, ttl_s=30)
            assert redis_says(port_of(url), "FLUSHALL") == b"+OK\r\n"

            await coordinator.acquire(JOB, RUN, count_max=1, cap=5, ttl_s=30)

            assert await coordinator.count(RUN) == 1


async def test_every_key_has_an_expiry(tmp_path: Path) -> None:
    with a_redis(tmp_path) as url:
        async with open_link(url) as link:
            coordinator = a_coordinator(link, a_space())
            await coordinator.acquire(JOB, RUN, count_max=2, cap=5, ttl_s=30)
            await coordinator.acquire_hosts([HostPool(JOB, "a.test", 2, 1.0)], ttl_s=30)
            await coordinator.put_status("me", {"run": "text"}, ttl_s=30)
            cache = a_cache(link)
            await cache.get("being read", "1", ttl_s=1)
            await put_and_look(cache, "kept")

            info = redis_says(port_of(url), "INFO", "keyspace").decode()

            assert (match := re.search(r"keys=(\d+),expires=(\d+)", info))
            assert match[1] == match[2]
            assert int(match[1]) >= 5, "the cached texts alone may have aged out"


@pytest.mark.slow
async def test_a_cached_text_expires_by_the_servers_clock(url: str) -> None:
    async with open_link(url) as link:
        cache = a_cache(link)

        with trio.fail_after(60):
            while not isinstance(await put_and_look(cache, "run"), CachedValue):
                pass  # On a busy machine the text may expire before it is read.
            while isinstance(await cache.get("run", "1", ttl_s=0.3), CachedValue):
                await trio.sleep(0.01)


async def put_and_look(cache: RedisCache, name: str) -> CachedValue | ReadTicket | None:
    ticket = await cache.get(name, "1", ttl_s=0.3)
    if isinstance(ticket, ReadTicket):
        await cache.put(name, ticket, "text")
    return await cache.get(name, "1", ttl_s=0.3)


async def test_a_server_that_may_evict_leases_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_redis(tmp_path) as url:
        redis_says(port_of(url), "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        async with open_link(url) as link:
            with caplog.at_level(logging.WARNING):
                await a_coordinator(link, a_space()).count(RUN)

    assert "noeviction" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("start", [a_redis, a_redis_cluster])
async def test_a_restarted_server_is_used_again(
    start: Callable[[Path, int], AbstractContextManager[str]], tmp_path: Path
) -> None:
    port = free_port()
    async with open_link(f"redis://127.0.0.1:{port}") as link:
        coordinator = a_coordinator(link, a_space())
        with start(tmp_path / "one", port):
            held = await coordinator.acquire(JOB, RUN, count_max=2, cap=2, ttl_s=30)
        with pytest.raises(Unavailable):
            await coordinator.count(RUN)
        with start(tmp_path / "two", port):
            lost = await coordinator.renew(held, ttl_s=30)
            new = await coordinator.acquire(JOB, RUN, count_max=2, cap=2, ttl_s=30)

    assert len(held) == len(new) == 2
    assert lost == frozenset(held)


async def test_a_server_that_does_not_answer_is_unavailable_after_the_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, _stay_silent, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        async with open_link(f"redis://127.0.0.1:{port}") as link:
            with pytest.raises(Unavailable):
                await RedisCoordinator(link, Random(1), space=a_space()).count(RUN)
        nursery.cancel_scope.cancel()

    assert trio.current_time() - started_at <= DEADLINE_S


async def _stay_silent(stream: trio.SocketStream) -> None:
    while await stream.receive_some():
        pass


async def test_a_missing_server_is_unavailable_at_once_and_its_address_not_shown() -> None:
    async with open_link("redis://:secret@127.0.0.1:1") as link:
        with pytest.raises(Unavailable) as caught:
            await a_coordinator(link, a_space()).count(RUN)

    assert "secret" not in str(caught.value)
