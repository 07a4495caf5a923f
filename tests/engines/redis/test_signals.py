"""Signals over a real server: every worker of a run receives them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio

from actors.cross_process_signals import CrossProcessSignals
from conveyor.domain.ids import JobId, RunId
from conveyor.engines.redis.connection import CoredisConnection, RedisChannel, open_link
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.coordinator import TeardownResult
from tests.builders import JOB, RUN
from tests.conformance.coordinators import a_space
from tests.servers import a_redis, free_port, redis_says

Signal = tuple[str, JobId, RunId]


@dataclass
class SignalRecorder:
    """Records the signals that a worker receives."""

    signals: list[Signal] = field(default_factory=list)
    something: trio.Event = field(default_factory=trio.Event)

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        self._note("changed", job_id, run_id)

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        self._note("opened", job_id, run_id)

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        self._note("teardown", job_id, run_id)
        return TeardownResult()

    def _note(self, word: str, job_id: JobId, run_id: RunId) -> None:
        self.signals.append((word, job_id, run_id))
        self.something.set()
        self.something = trio.Event()

    async def wait_for(self, *expected: Signal) -> None:
        with trio.fail_after(10):
            while not set(expected) <= set(self.signals):
                await self.something.wait()


@dataclass(frozen=True)
class Process:
    signals: CrossProcessSignals
    coordinator: RedisCoordinator
    channel: RedisChannel


@pytest.fixture(params=["redis", "redis_cluster"])
def url(request: pytest.FixtureRequest) -> str:
    address: str = request.getfixturevalue(request.param)
    return address


def _process(
    link: CoredisConnection,
    space: str,
    owner: str,
    ear: SignalRecorder | None = None,
    *,
    control_queue: SignalRecorder | None = None,
    can_abandon: bool = False,
) -> Process:
    # The first call finds the nodes of the cluster, which takes some time on a busy machine.
    coordinator = RedisCoordinator(link, Random(owner), space=space, deadline_s=10)
    channel = RedisChannel(link, space=space, owner=owner)
    signals = CrossProcessSignals(
        coordinator=coordinator,
        local=ear,
        tell=channel.tell,
        notify=(control_queue or SignalRecorder()).batch_opened,
        can_abandon=can_abandon,
    )
    return Process(signals, coordinator, channel)


@asynccontextmanager
async def _listening(
    url: str, space: str, *ears: SignalRecorder
) -> AsyncGenerator[list[Process], None]:
    """Worker processes that receive signals."""
    async with open_link(url) as link, trio.open_nursery() as nursery:
        processes = [
            _process(link, space, f"worker-{number}", ear) for number, ear in enumerate(ears)
        ]
        for process, ear in zip(processes, ears, strict=True):
            nursery.start_soon(process.channel.listen_forever, ear.run_changed)
        await _wait_for_subscribers(url, space, len(ears))
        yield processes
        nursery.cancel_scope.cancel()


async def _wait_for_subscribers(url: str, space: str, count: int) -> None:
    port = int(url.rpartition(":")[2])
    with trio.fail_after(10):
        while f":{count}\r\n".encode() not in redis_says(
            port, "PUBSUB", "NUMSUB", f"{space}:signals"
        ):
            await trio.sleep(0.01)


async def test_every_worker_receives_the_signal_of_a_changed_run(url: str) -> None:
    space, one, other = a_space(), SignalRecorder(), SignalRecorder()
    async with _listening(url, space, one, other), open_link(url) as link:
        await _process(link, space, "api").signals.run_changed(JOB, RUN)

        await one.wait_for(("changed", JOB, RUN))
        await other.wait_for(("changed", JOB, RUN))


async def test_a_worker_receives_its_own_signal_once(url: str) -> None:
    space, one, other = a_space(), SignalRecorder(), SignalRecorder()
    async with _listening(url, space, one, other) as [process, _]:
        await process.signals.run_changed(JOB, RUN)
        await other.wait_for(("changed", JOB, RUN))

    assert one.signals == [("changed", JOB, RUN)]
    assert other.signals == [("changed", JOB, RUN)]


@pytest.mark.parametrize("has_worker", [False, True])
async def test_a_new_list_is_signalled_to_the_local_worker_or_else_to_the_control_queue(
    redis: str, has_worker: bool
) -> None:
    here, control_queue = SignalRecorder(), SignalRecorder()
    async with open_link(redis) as link:
        process = _process(
            link, a_space(), "me", here if has_worker else None, control_queue=control_queue
        )

        await process.signals.batch_opened(JOB, RUN)

    assert here.signals == ([("opened", JOB, RUN)] if has_worker else [])
    assert control_queue.signals == ([] if has_worker else [("opened", JOB, RUN)])


async def test_a_teardown_ends_when_the_last_lease_of_the_run_is_released(url: str) -> None:
    space, ear = a_space(), SignalRecorder()
    async with _listening(url, space, ear) as [worker], open_link(url) as link:
        held = await worker.coordinator.acquire(JOB, RUN, count_max=3, cap=9, ttl_s=30)
        receipts: list[TeardownResult] = []

        async def tear_down() -> None:
            signals = _process(link, space, "api", can_abandon=True).signals
            receipts.append(await signals.teardown(JOB, RUN, deadline_s=20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tear_down)
            await ear.wait_for(("changed", JOB, RUN))
            assert receipts == []
            await worker.coordinator.release(held)

    assert receipts == [TeardownResult(released=3, abandoned=3, complete=True)]


async def test_a_teardown_that_takes_too_long_is_not_complete(url: str) -> None:
    space = a_space()
    async with open_link(url) as link:
        process = _process(link, space, "api")
        await process.coordinator.acquire(JOB, RUN, count_max=1, cap=9, ttl_s=30)

        receipt = await process.signals.teardown(JOB, RUN, deadline_s=0.05)

    assert receipt == TeardownResult(released=1, complete=False)


async def test_signals_can_be_sent_while_the_server_is_unavailable() -> None:
    ear = SignalRecorder()
    async with open_link(f"redis://127.0.0.1:{free_port()}") as link:
        process = _process(link, a_space(), "worker", ear)

        await process.signals.run_changed(JOB, RUN)

    assert ear.signals == [("changed", JOB, RUN)]


@pytest.mark.slow
async def test_a_worker_receives_signals_after_a_restart_of_the_server(tmp_path: Path) -> None:
    port, space, ear = free_port(), a_space(), SignalRecorder()
    url = f"redis://127.0.0.1:{port}"
    async with open_link(url) as link, trio.open_nursery() as nursery:
        with a_redis(tmp_path / "one", port):
            worker = _process(link, space, "worker", ear)
            nursery.start_soon(worker.channel.listen_forever, ear.run_changed)
            await _wait_for_subscribers(url, space, 1)
        with a_redis(tmp_path / "two", port):
            await _wait_for_subscribers(url, space, 1)
            async with open_link(url) as other:
                await _process(other, space, "api").signals.run_changed(JOB, RUN)
            await ear.wait_for(("changed", JOB, RUN))
        nursery.cancel_scope.cancel()
