"""Large and slow bodies: none delays another caller, and bodies that arrive too slowly are
interrupted."""

from __future__ import annotations

import gzip
import random
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.executor import COMPUTE_THREADS_MAX, ThreadExecutor
from conveyor.http_client.connection_limits import PoolLimits, Rate
from conveyor.http_client.errors import (
    BadEncoding,
    BodyTooLarge,
    NoMemoryForBody,
    TimedOut,
    TooSlow,
)
from conveyor.http_client.large_bodies import Decoding
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import RECEIVE_BYTES
from conveyor.ports.executor import T
from conveyor.ports.gateway import PageMemory
from tests.http_client.conftest import ALL_LARGE, TLS, MakePool, get
from tests.http_client.server import Peer, answering, raw_server, reply

LARGE = 200_000
NEVER = Rate(1e6, 1.0)


def slow_reply(start_bytes: int, size_bytes: int = LARGE) -> Callable[[Peer], Awaitable[None]]:
    """Announces a large body, sends its start at once and the rest byte by byte."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {size_bytes}\r\n\r\n"
        await peer.send(head.encode() + b"." * start_bytes)
        while True:
            await peer.send(b".")
            await trio.sleep(0.005)

    return handler


async def expect_cut(pool: HttpPool, url: str, partition: str) -> None:
    with pytest.raises(TimedOut):
        await pool.fetch(get(url, partition=partition, deadline_s=30.0))


async def test_a_body_that_arrives_too_slowly_is_interrupted_long_before_its_deadline(
    make_pool: MakePool,
) -> None:
    pool = make_pool(body_rate_min=Rate(0.03, 100_000.0))
    async with raw_server(slow_reply(0)) as server:
        with pytest.raises(TooSlow):
            await pool.fetch(get(server.url(), deadline_s=1e6))

    assert pool.origin_count == 0


async def test_an_unwanted_body_that_arrives_too_slowly_is_interrupted_too(
    make_pool: MakePool,
) -> None:
    pool = make_pool(body_rate_min=Rate(0.03, 100_000.0))
    async with raw_server(slow_reply(0)) as server:
        with pytest.raises(TooSlow):
            await pool.fetch(get(server.url(), deadline_s=1e6, wants_body=lambda status: False))


async def test_a_pause_within_the_grace_does_not_interrupt_a_body(make_pool: MakePool) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npa")
        await trio.sleep(0.03)
        await peer.send(b"ge")

    pool = make_pool(body_rate_min=Rate(30.0, 1024.0))
    async with raw_server(handler) as server:
        assert (await pool.fetch(get(server.url()))).body == b"page"


async def test_an_announced_length_reserves_no_memory(make_pool: MakePool) -> None:
    pool = make_pool(large_bodies_bytes_max=LARGE, unreserved_body_bytes=100_000)
    large = b"x" * LARGE
    async with (
        raw_server(slow_reply(50_000)) as hostile,
        raw_server(answering(reply(large))) as honest,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(expect_cut, pool, hostile.url(), "attacker")
        await trio.sleep(0.02)
        assert (await pool.fetch(get(honest.url(), partition="victim"))).body == large
        nursery.cancel_scope.cancel()


async def test_one_caller_cannot_use_all_of_the_body_memory(make_pool: MakePool) -> None:
    pool = make_pool(
        large_bodies_bytes_max=4 * LARGE,
        **ALL_LARGE,
        large_body_rate_min=NEVER,
        crowded_body_rate_min=NEVER,
    )
    large = b"x" * LARGE
    async with (
        raw_server(slow_reply(50_000)) as hostile,
        raw_server(answering(reply(large))) as honest,
        trio.open_nursery() as nursery,
    ):
        for _ in range(8):
            nursery.start_soon(expect_cut, pool, hostile.url(), "attacker")
        while pool._body_memory.large.free_count > 2 * LARGE:
            await trio.sleep(0.001)
        for _ in range(3):
            assert (await pool.fetch(get(honest.url(), partition="victim"))).body == large
        nursery.cancel_scope.cancel()


async def test_slow_bodies_of_many_callers_are_interrupted_when_another_one_waits(
    make_pool: MakePool,
) -> None:
    pool = make_pool(
        large_bodies_bytes_max=2 * LARGE,
        **ALL_LARGE,
        large_body_rate_min=NEVER,
        crowded_body_rate_min=Rate(0.02, 1_000_000.0),
    )
    large = b"x" * LARGE
    cut: list[str] = []

    async def attack(partition: str) -> None:
        with pytest.raises(TooSlow):
            await pool.fetch(get(hostile.url(), partition=partition, deadline_s=1e6))
        cut.append(partition)

    async with (
        raw_server(slow_reply(50_000)) as hostile,
        raw_server(answering(reply(large))) as honest,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(attack, "first")
        nursery.start_soon(attack, "second")
        while pool._body_memory.large.free_count:
            await trio.sleep(0.001)
        await trio.sleep(0.03)
        assert cut == []
        assert (await pool.fetch(get(honest.url(), partition="victim"))).body == large
        assert len(cut) == 1
        nursery.cancel_scope.cancel()


MEDIUM, LARGER = 300_000, 600_000
UNRESERVED = 10_000


def make_watched_pool(make_pool: MakePool, **limits: Rate) -> tuple[HttpPool, Callable[[], int]]:
    """A pool with room for four medium and four large bodies, and the bytes that are reserved."""
    pool = make_pool(
        unreserved_body_bytes=UNRESERVED,
        medium_bodies_bytes_max=4 * MEDIUM,
        large_body_bytes=400_000,
        large_bodies_bytes_max=4 * LARGER,
        **limits,
    )
    memory = pool._body_memory
    total = memory.medium.free_count + memory.large.free_count
    return pool, lambda: total - memory.medium.free_count - memory.large.free_count


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("size_bytes", [MEDIUM, LARGER])
async def test_many_concurrent_bodies_stay_within_the_memory_and_all_arrive(
    make_pool: MakePool, size_bytes: int, encoding: str
) -> None:
    pool, reserved = make_watched_pool(make_pool)
    body = random.Random(1).randbytes(size_bytes)
    sent = body if encoding == "identity" else gzip.compress(body)
    # Bytes that arrive before a body needs a reservation are added, and those of the last read.
    uncounted_bytes = UNRESERVED + RECEIVE_BYTES
    arrived = pages_in_memory = 0

    async def fetch(caller: str) -> None:
        nonlocal arrived, pages_in_memory
        page = PageMemory()
        request = get(
            server.url(),
            partition=caller,
            memory=page,
            deadline_s=60.0,
            body_bytes_max=LARGER,
        )
        assert (await pool.fetch(request)).body == body
        arrived += 1
        pages_in_memory += 1
        assert reserved() >= pages_in_memory * (size_bytes - uncounted_bytes)
        await trio.sleep(0.002)  # Storing the page takes a while.
        pages_in_memory -= 1
        page.release()

    answer = reply(sent, headers={"Content-Encoding": encoding})
    async with raw_server(answering(*[answer] * 40)) as server, trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(fetch, f"caller-{number % 3}")

    assert arrived == 40
    assert reserved() == 0


async def test_a_page_holds_its_memory_until_it_is_released(make_pool: MakePool) -> None:
    pool, reserved = make_watched_pool(make_pool)
    sizes = []
    for size_bytes in (1_000, MEDIUM, LARGER):
        page = PageMemory()
        async with raw_server(answering(reply(b"x" * size_bytes))) as server:
            await pool.fetch(get(server.url(), memory=page))
        sizes.append(reserved())
        page.release()
        page.release()

    assert (sizes[0], sizes[2]) == (0, LARGER)
    assert MEDIUM - RECEIVE_BYTES < sizes[1] <= MEDIUM
    assert reserved() == 0


async def test_a_body_without_a_reservation_is_counted_until_it_has_arrived(
    make_pool: MakePool,
) -> None:
    pool, reserved = make_watched_pool(make_pool)
    async with raw_server(answering(reply(b"x" * LARGER))) as server:
        await pool.fetch(get(server.url()))

    assert reserved() == 0


async def test_a_cancelled_fetch_releases_its_memory_and_its_turn(make_pool: MakePool) -> None:
    pool, reserved = make_watched_pool(
        make_pool, large_body_rate_min=NEVER, crowded_body_rate_min=NEVER
    )
    async with raw_server(slow_reply(450_000, LARGER)) as server, trio.open_nursery() as nursery:
        # Two fetches hold all that the caller may have, and one waits.
        for _ in range(3):
            nursery.start_soon(expect_cut, pool, server.url(), "caller")
        while reserved() < 2 * LARGER or not pool._body_memory.large._waiters_count:
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()

    assert reserved() == 0
    assert pool._body_memory.large._waiters_count == 0


async def test_a_small_page_does_not_wait_for_the_memory_of_large_ones(make_pool: MakePool) -> None:
    pool, reserved = make_watched_pool(
        make_pool, large_body_rate_min=NEVER, crowded_body_rate_min=NEVER
    )
    async with (
        raw_server(slow_reply(450_000, LARGER)) as slow,
        raw_server(answering(reply(b"page"))) as quick,
        trio.open_nursery() as nursery,
    ):
        for number in range(8):
            nursery.start_soon(expect_cut, pool, slow.url(), f"caller-{number % 2}")
        while reserved() < 4 * LARGER:
            await trio.sleep(0.001)
        assert (await pool.fetch(get(quick.url(), partition="caller-0"))).body == b"page"
        nursery.cancel_scope.cancel()


async def test_a_body_that_gets_no_memory_before_its_deadline_is_not_a_failure_of_the_site(
    make_pool: MakePool,
) -> None:
    pool, _ = make_watched_pool(make_pool)
    memories = [PageMemory() for _ in range(2)]
    async with raw_server(answering(*[reply(b"x" * LARGER)] * 3)) as server:
        for page in memories:
            await pool.fetch(get(server.url(), memory=page))
        with pytest.raises(NoMemoryForBody):
            await pool.fetch(get(server.url(), memory=PageMemory(), deadline_s=0.05))
        for page in memories:
            page.release()


class Recording:
    """Runs work in threads and records which thread did it."""

    def __init__(self) -> None:
        self._threads = ThreadExecutor(COMPUTE_THREADS_MAX)
        self.count = 0
        self.idents: set[int] = set()

    async def run(self, work: Callable[[], T]) -> T:
        self.count += 1

        def recorded() -> T:
            self.idents.add(threading.get_ident())
            return work()

        return await self._threads.run(recorded)


def make_encoded_reply(body: bytes) -> bytes:
    return reply(body, headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(("size_bytes", "is_aside"), [(20_000, False), (400_000, True)])
async def test_large_bodies_are_decoded_in_another_thread_and_small_ones_in_this_one(
    size_bytes: int, is_aside: bool
) -> None:
    executor = Recording()
    pool = HttpPool(TargetPolicy(allow_private=True), tls=TLS, executor=executor)
    page = random.Random(1).randbytes(size_bytes)
    async with raw_server(answering(make_encoded_reply(gzip.compress(page)))) as server:
        assert (await pool.fetch(get(server.url()))).body == page
        pool.close()

    assert bool(executor.count) is is_aside
    assert threading.get_ident() not in executor.idents


async def test_a_small_body_that_inflates_to_a_large_one_is_decoded_in_another_thread() -> None:
    executor = Recording()
    pool = HttpPool(TargetPolicy(allow_private=True), tls=TLS, executor=executor)
    packed = gzip.compress(bytes(3_000_000))
    async with raw_server(answering(make_encoded_reply(packed))) as server:
        with pytest.raises(BodyTooLarge, match="two hundredfold"):
            await pool.fetch(get(server.url()))

    assert len(packed) < 32 * 1024
    assert executor.count


async def test_decoding_without_output_ends_the_fetch_and_closes_its_connection() -> None:
    pool = HttpPool(
        TargetPolicy(allow_private=True), tls=TLS, executor=ThreadExecutor(COMPUTE_THREADS_MAX)
    )
    async with raw_server(answering(make_encoded_reply(gzip.compress(b"") * 50_000))) as server:
        with pytest.raises(BadEncoding):
            await pool.fetch(get(server.url()))

    assert pool.origin_count == 0


async def test_each_caller_decodes_in_one_thread_at_a_time() -> None:
    running: list[str] = []
    most: list[int] = []
    release = trio.Event()

    class Gated:
        async def run(self, work: Callable[[], T]) -> T:
            await release.wait()
            return work()

    decoding = Decoding(Gated())

    async def step(partition: str) -> None:
        await decoding.run(partition, lambda: running.append(partition))

    async with trio.open_nursery() as nursery:
        for partition in ("a", "a", "a", "b"):
            nursery.start_soon(step, partition)
        await trio.testing.wait_all_tasks_blocked()
        most.append(decoding._shares.free_count)
        release.set()

    assert most == [0]
    assert running.index("b") <= 1
    assert len(running) == 4


def test_the_default_minimum_rates_are_those_of_the_specification() -> None:
    limits = PoolLimits()

    assert [limits.body_rate_min.seconds_for(n * 1024) for n in (1, 100)] == [30, 100]
    assert [limits.large_body_rate_min.seconds_for(n * 1024) for n in (16, 1024)] == [15, 64]
    assert [limits.crowded_body_rate_min.seconds_for(n * 1024) for n in (1, 1024)] == [2, 4]
