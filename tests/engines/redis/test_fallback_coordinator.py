"""While the server is unavailable, every worker keeps to its share of a cap; afterwards shared
leases apply again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.engines.redis import open_redis
from conveyor.engines.redis.connection import open_link
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.fallback_coordinator import FallbackCoordinator
from conveyor.ports.coordinator import HostPool
from conveyor.ports.errors import Unavailable
from tests.builders import JOB, OTHER_RUN, RUN
from tests.conformance.coordinators import a_space
from tests.servers import a_redis, free_port


@dataclass
class InterruptibleCoordinator:
    """A coordinator on a real server whose connection a test can interrupt."""

    inner: RedisCoordinator
    is_cut: bool = False

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        self._check()
        return await self.inner.acquire(job_id, run_id, count_max=count_max, cap=cap, ttl_s=ttl_s)

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        self._check()
        return await self.inner.acquire_hosts(pools, ttl_s=ttl_s)

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        self._check()
        return await self.inner.renew(lease_ids, ttl_s=ttl_s)

    async def restore(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> None:
        self._check()
        await self.inner.restore(lease_ids, ttl_s=ttl_s)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        self._check()
        await self.inner.release(lease_ids)

    async def count(self, run_id: RunId) -> int:
        self._check()
        return await self.inner.count(run_id)

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        self._check()
        await self.inner.put_status(owner, marks, ttl_s=ttl_s)

    async def list_status(self, subject: str) -> list[str]:
        self._check()
        return await self.inner.list_status(subject)

    def _check(self) -> None:
        if self.is_cut:
            raise Unavailable("cut")


@pytest.fixture
async def remote(redis: str) -> AsyncIterator[InterruptibleCoordinator]:
    async with open_link(redis) as link:
        yield InterruptibleCoordinator(RedisCoordinator(link, Random(1), space=a_space()))


@pytest.fixture
async def fallback(remote: InterruptibleCoordinator) -> FallbackCoordinator:
    return FallbackCoordinator(remote, Random(2), workers_on="workers")


async def _see_workers(fallback: FallbackCoordinator, count: int) -> None:
    for number in range(count):
        await fallback.put_status(f"worker-{number}", {"workers": "here"}, ttl_s=30)
    await fallback.list_status("workers")


async def _take(fallback: FallbackCoordinator, count_max: int, cap: int) -> list[LeaseId]:
    return await fallback.acquire(JOB, RUN, count_max=count_max, cap=cap, ttl_s=30)


@pytest.mark.parametrize(("cap", "workers", "share"), [(10, 3, 4), (1, 3, 1), (7, 1, 7)])
async def test_a_worker_keeps_to_its_share_among_the_workers_last_seen(
    remote: InterruptibleCoordinator,
    fallback: FallbackCoordinator,
    cap: int,
    workers: int,
    share: int,
) -> None:
    await _see_workers(fallback, workers)
    remote.is_cut = True

    first, second = await _take(fallback, 100, cap), await _take(fallback, 100, cap)

    assert [len(first), len(second)] == [share, 0]


async def test_leases_acquired_before_the_outage_count_towards_the_share(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    await _see_workers(fallback, 2)
    held = await _take(fallback, 3, cap=8)
    remote.is_cut = True

    assert len(await _take(fallback, 100, cap=8)) == 1

    await fallback.release(held)
    assert len(await _take(fallback, 100, cap=8)) == 3


async def test_leases_of_work_in_flight_are_kept_during_an_outage(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    [lease, released] = await _take(fallback, 2, cap=5)
    remote.is_cut = True
    await fallback.release([released])

    lost = await fallback.renew([lease, released], ttl_s=30)

    assert lost == frozenset({released})


async def test_leases_are_not_counted_while_those_of_others_cannot_be_seen(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    await _take(fallback, 2, cap=5)
    remote.is_cut = True

    with pytest.raises(Unavailable):
        await fallback.count(RUN)
    with pytest.raises(Unavailable):
        await fallback.count(OTHER_RUN)


async def test_leases_held_during_an_outage_are_restored_on_the_server(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    before = await _take(fallback, 2, cap=6)
    remote.is_cut = True
    meanwhile = await _take(fallback, 3, cap=6)
    # The server has no leases, as after an outage longer than a lease lives.
    await remote.inner.release(before)
    remote.is_cut = False

    await fallback.reconnect()

    assert len(meanwhile) == 3
    assert await remote.inner.count(RUN) == 5
    assert len(await _take(fallback, 100, cap=6)) == 1
    assert await fallback.renew([*before, *meanwhile], ttl_s=30) == frozenset()


async def test_the_share_applies_while_the_server_is_still_unavailable(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    remote.is_cut = True
    await _take(fallback, 1, cap=5)

    with pytest.raises(Unavailable):
        await fallback.reconnect()

    assert fallback.is_away
    assert len(await _take(fallback, 1, cap=5)) == 1


async def test_a_host_pool_grants_a_share_of_its_cap_at_a_lower_rate(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    await _see_workers(fallback, 2)
    remote.is_cut = True
    wide, spaced = HostPool(JOB, "wide.test", 4), HostPool(JOB, "spaced.test", 4, spacing_s=60.0)

    through = await fallback.acquire_hosts([wide, wide, wide, spaced, spaced], ttl_s=30)

    assert [lease is not None for lease in through] == [True, True, False, True, False]
    assert await _take(fallback, 1, cap=1) != []


async def test_during_an_outage_status_texts_are_dropped_and_cannot_be_listed(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    remote.is_cut = True

    await fallback.put_status("me", {"workers": "here"}, ttl_s=30)

    with pytest.raises(Unavailable):
        await fallback.list_status("workers")


async def test_the_start_and_the_end_of_an_outage_are_logged_once(
    remote: InterruptibleCoordinator,
    fallback: FallbackCoordinator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        remote.is_cut = True
        for _ in range(5):
            held = await _take(fallback, 1, cap=9)
            await fallback.renew(held, ttl_s=30)
            await fallback.release(held)
        remote.is_cut = False
        await fallback.reconnect()
        await _take(fallback, 1, cap=9)

    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["coordinator unavailable", "coordinator available again"]


@pytest.mark.slow
async def test_a_restart_of_the_server_loses_no_lease(tmp_path: Path) -> None:
    port, space = free_port(), a_space()
    url = f"redis://127.0.0.1:{port}"
    async with open_redis(
        url, random=Random(1), space=space, owner="me", workers_on="workers"
    ) as engine:
        fallback = engine.coordinator
        with a_redis(tmp_path / "one", port):
            before = await _take(fallback, 2, cap=5)
            assert not fallback.is_away
        meanwhile = await _take(fallback, 2, cap=5)
        with a_redis(tmp_path / "two", port), trio.fail_after(20):
            while fallback.is_away:
                await trio.sleep(0.01)
            lost = await fallback.renew([*before, *meanwhile], ttl_s=30)
            after = await _take(fallback, 5, cap=5)

    assert [len(before), len(meanwhile), len(after)] == [2, 2, 1]
    assert lost == frozenset()


async def test_workers_that_a_restarted_server_lost_still_count_in_the_next_outage(
    remote: InterruptibleCoordinator, fallback: FallbackCoordinator
) -> None:
    """The server restarted empty, and only this worker has reported itself before the next
    outage."""
    await _see_workers(fallback, 3)
    remote.is_cut = True
    first = await _take(fallback, 1, cap=9)
    for number in range(3):
        await remote.inner.put_status(f"worker-{number}", {"workers": ""}, ttl_s=0)
    remote.is_cut = False
    await fallback.reconnect()
    await _see_workers(fallback, 1)
    remote.is_cut = True

    taken = await _take(fallback, 100, cap=9)

    assert len(first + taken) == 3
