"""CrossProcessSignals: which processes are notified, and when a teardown over processes is
complete."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import trio
from trio.testing import MockClock

from actors.cross_process_signals import CrossProcessSignals
from conveyor.domain.ids import JobId, RunId
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from tests.builders import JOB, RUN
from tests.usecases.world import SignalLog, a_world


def some_signals(*, local: bool) -> tuple[CrossProcessSignals, list[str]]:
    """Signals between processes, and a log of the messages that this process sends."""
    world, sent = a_world(), list[str]()

    async def send(name: str, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        sent.append(name)

    signals = CrossProcessSignals(
        coordinator=world.env.coordinator,
        local=world.signals if local else None,
        tell=partial(send, "all"),
        notify=partial(send, "one"),
        can_abandon=True,
    )
    return signals, sent


def sent_texts(signals: CrossProcessSignals) -> list[str]:
    return [name for name, _ in cast("SignalLog", signals.local).said]


async def test_a_changed_run_is_signalled_to_the_worker_here_and_to_all_others() -> None:
    signals, sent = some_signals(local=True)

    await signals.run_changed(JOB, RUN)

    assert (sent_texts(signals), sent) == (["run_changed"], ["all"])


async def test_a_new_list_is_signalled_to_one_worker_and_preferably_to_the_one_here() -> None:
    here, sent_from_here = some_signals(local=True)
    without, sent_without = some_signals(local=False)

    for signals in (here, without):
        await signals.batch_opened(JOB, RUN)

    assert (sent_texts(here), sent_from_here) == (["batch_opened"], [])
    assert sent_without == ["one"]


async def test_a_teardown_waits_until_no_lease_of_the_run_is_left(
    autojump_clock: MockClock,
) -> None:
    signals, sent = some_signals(local=True)
    lease_ids = await signals.coordinator.acquire(JOB, RUN, count_max=3, cap=9, ttl_s=600)

    async def release_later() -> None:
        await trio.sleep(2)
        await signals.coordinator.release(lease_ids)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(release_later)
        receipt = await signals.teardown(JOB, RUN, deadline_s=5)

    assert (receipt.complete, receipt.released, receipt.abandoned) == (True, 3, 3)
    assert (sent_texts(signals), sent) == (["teardown"], ["all"])


async def test_a_teardown_is_not_complete_while_leases_are_left_at_its_deadline(
    autojump_clock: MockClock,
) -> None:
    signals, _ = some_signals(local=False)
    await signals.coordinator.acquire(JOB, RUN, count_max=2, cap=9, ttl_s=600)

    receipt = await replace(signals, can_abandon=False).teardown(JOB, RUN, deadline_s=5)

    assert (receipt.complete, receipt.released, receipt.abandoned) == (False, 2, 0)


class UnavailableCoordinator:
    """A coordinator that does not answer."""

    async def count(self, run_id: RunId) -> int:
        raise Unavailable("away")


async def test_a_teardown_ends_the_work_although_its_leases_cannot_be_counted() -> None:
    signals, sent = some_signals(local=True)
    lost = replace(signals, coordinator=cast("Coordinator", UnavailableCoordinator()))

    receipt = await lost.teardown(JOB, RUN, deadline_s=5)

    assert not receipt.complete
    assert (sent_texts(signals), sent) == (["teardown"], ["all"])
