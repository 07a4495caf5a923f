"""While the server is away every worker keeps to its share of a cap; then all is as it was."""

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
class Severed:
    """A coordinator on a real server, until somebody cuts the line."""

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
async def remote(redis: str) -> AsyncIterator[Severed]:
    async with open_link(redis) as link:
        yield Severed(RedisCoordinator(link, Random(1), space=a_space()))


@pytest.fixture
async def steady(remote: Severed) -> FallbackCoordinator:
    return FallbackCoordinator(remote, Random(2), workers_on="workers")


async def _see_workers(steady: FallbackCoordinator, count: int) -> None:
    for number in range(count):
        await steady.put_status(f"worker-{number}", {"workers": "here"}, ttl_s=30)
    await steady.list_status("workers")


async def _take(steady: FallbackCoordinator, count_max: int, cap: int) -> list[LeaseId]:
    return await steady.acquire(JOB, RUN, count_max=count_max, cap=cap, ttl_s=30)


@pytest.mark.parametrize(("cap", "workers", "share"), [(10, 3, 4), (1, 3, 1), (7, 1, 7)])
async def test_a_worker_keeps_to_its_share_by_the_workers_last_seen(
    remote: Severed, steady: FallbackCoordinator, cap: int, workers: int, share: int
) -> None:
    await _see_workers(steady, workers)
    remote.is_cut = True

    first, second = await _take(steady, 100, cap), await _take(steady, 100, cap)

    assert [len(first), len(second)] == [share, 0]


async def test_what_was_held_before_counts_towards_the_share(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    await _see_workers(steady, 2)
    held = await _take(steady, 3, cap=8)
    remote.is_cut = True

    assert len(await _take(steady, 100, cap=8)) == 1

    await steady.release(held)
    assert len(await _take(steady, 100, cap=8)) == 3


async def test_work_under_way_keeps_its_leases(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    [lease, released] = await _take(steady, 2, cap=5)
    remote.is_cut = True
    await steady.release([released])

    lost = await steady.renew([lease, released], ttl_s=30)

    assert lost == frozenset({released})


async def test_leases_are_not_counted_while_those_of_others_cannot_be_seen(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    await _take(steady, 2, cap=5)
    remote.is_cut = True

    with pytest.raises(Unavailable):
        await steady.count(RUN)
    with pytest.raises(Unavailable):
        await steady.count(OTHER_RUN)


async def test_what_is_held_is_known_to_the_server_when_it_is_back(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    before = await _take(steady, 2, cap=6)
    remote.is_cut = True
    meanwhile = await _take(steady, 3, cap=6)
    # As if it had been away for longer than a lease lives.
    await remote.inner.release(before)
    remote.is_cut = False

    await steady.reconnect()

    assert len(meanwhile) == 3
    assert await remote.inner.count(RUN) == 5
    assert len(await _take(steady, 100, cap=6)) == 1
    assert await steady.renew([*before, *meanwhile], ttl_s=30) == frozenset()


async def test_a_server_that_is_still_away_is_not_relied_on(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    remote.is_cut = True
    await _take(steady, 1, cap=5)

    with pytest.raises(Unavailable):
        await steady.reconnect()

    assert steady.is_away
    assert len(await _take(steady, 1, cap=5)) == 1


async def test_a_door_lets_through_a_share_and_more_slowly(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    await _see_workers(steady, 2)
    remote.is_cut = True
    wide, spaced = HostPool(JOB, "wide.test", 4), HostPool(JOB, "spaced.test", 4, spacing_s=60.0)

    through = await steady.acquire_hosts([wide, wide, wide, spaced, spaced], ttl_s=30)

    assert [lease is not None for lease in through] == [True, True, False, True, False]
    assert await _take(steady, 1, cap=1) != []


async def test_marks_are_let_go_of_and_nobody_is_told_that_there_are_none(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    remote.is_cut = True

    await steady.put_status("me", {"workers": "here"}, ttl_s=30)

    with pytest.raises(Unavailable):
        await steady.list_status("workers")


async def test_it_is_said_once_that_it_is_away_and_once_that_it_is_back(
    remote: Severed, steady: FallbackCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        remote.is_cut = True
        for _ in range(5):
            held = await _take(steady, 1, cap=9)
            await steady.renew(held, ttl_s=30)
            await steady.release(held)
        remote.is_cut = False
        await steady.reconnect()
        await _take(steady, 1, cap=9)

    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["coordinator unavailable", "coordinator available again"]


@pytest.mark.slow
async def test_a_server_that_dies_and_comes_back_costs_no_lease(tmp_path: Path) -> None:
    port, space = free_port(), a_space()
    url = f"redis://127.0.0.1:{port}"
    async with open_redis(
        url, random=Random(1), space=space, owner="me", workers_on="workers"
    ) as engine:
        steady = engine.coordinator
        with a_redis(tmp_path / "one", port):
            before = await _take(steady, 2, cap=5)
            assert not steady.is_away
        meanwhile = await _take(steady, 2, cap=5)
        with a_redis(tmp_path / "two", port), trio.fail_after(20):
            while steady.is_away:
                await trio.sleep(0.01)
            lost = await steady.renew([*before, *meanwhile], ttl_s=30)
            after = await _take(steady, 5, cap=5)

    assert [len(before), len(meanwhile), len(after)] == [2, 2, 1]
    assert lost == frozenset()


async def test_workers_that_a_server_forgot_are_not_forgotten_here(
    remote: Severed, steady: FallbackCoordinator
) -> None:
    """It came back empty, and only this worker has left its mark again when it goes once more."""
    await _see_workers(steady, 3)
    remote.is_cut = True
    first = await _take(steady, 1, cap=9)
    for number in range(3):
        await remote.inner.put_status(f"worker-{number}", {"workers": ""}, ttl_s=0)
    remote.is_cut = False
    await steady.reconnect()
    await _see_workers(steady, 1)
    remote.is_cut = True

    taken = await _take(steady, 100, cap=9)

    assert len(first + taken) == 3
