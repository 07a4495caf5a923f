"""The dynamic supervisor: children that start, stop, crash and overrun by name."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.runtime import (
    Child,
    DynamicSupervisor,
    Intensity,
    NameTaken,
    NeverReady,
    NotSupervising,
    Policy,
    Strategy,
    Supervisor,
    nest,
)
from tests.actors.runtime.toys import Boom, Lingerer, Puppet, puppets, states


async def started(nursery: trio.Nursery) -> DynamicSupervisor:
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0)
    await nursery.start(supervisor.run)
    return supervisor


async def test_children_run_as_soon_as_they_are_started(nursery: trio.Nursery) -> None:
    journal: list[str] = []
    supervisor = await started(nursery)

    for puppet in puppets("ba", journal).values():
        await supervisor.start_child(puppet.child())

    assert journal == ["+b", "+a"]
    assert supervisor.names() == ("a", "b")


async def test_start_waits_until_the_child_reports_ready(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(3.0)
        task_status.started()
        await trio.sleep_forever()

    supervisor = await started(nursery)

    await supervisor.start_child(Child("slow", run=slow, reports_ready=True))

    assert trio.current_time() == pytest.approx(3.0)


async def test_starting_a_child_that_ends_before_it_is_ready_fails(nursery: trio.Nursery) -> None:
    async def crash(*, task_status: trio.TaskStatus[None]) -> None:
        raise Boom

    supervisor = await started(nursery)

    with pytest.raises(NeverReady) as raised:
        await supervisor.start_child(
            Child("a", run=crash, reports_ready=True, restart=Policy.TEMPORARY)
        )

    assert isinstance(raised.value.__cause__, Boom)
    assert supervisor.names() == ()


async def test_a_name_belongs_to_one_child_at_a_time(nursery: trio.Nursery) -> None:
    supervisor = await started(nursery)
    await supervisor.start_child(Puppet("a", []).child())

    with pytest.raises(NameTaken):
        await supervisor.start_child(Puppet("a", []).child())


async def test_a_supervisor_that_is_not_running_accepts_no_children(nursery: trio.Nursery) -> None:
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0)

    with pytest.raises(NotSupervising):
        await supervisor.start_child(Puppet("a", []).child())


async def test_a_supervisor_that_is_stopping_accepts_no_children(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0)
    refused: list[str] = []

    async def start_another_when_stopped() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True), pytest.raises(NotSupervising):
                await supervisor.start_child(Puppet("b", []).child())
            refused.append("b")

    with trio.move_on_after(1.0):
        async with trio.open_nursery() as inner:
            await inner.start(supervisor.run)
            await supervisor.start_child(Child("a", run=start_another_when_stopped))

    assert refused == ["b"]


async def test_a_grace_longer_than_the_supervisor_allows_is_refused(nursery: trio.Nursery) -> None:
    supervisor = await started(nursery)

    with pytest.raises(AssertionError, match="too long a grace"):
        await supervisor.start_child(Child("a", run=trio.sleep_forever, stop_grace_s=31.0))


async def test_stop_returns_when_the_shielded_clean_up_is_over(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    supervisor = await started(nursery)
    await supervisor.start_child(Lingerer("a", journal, lingers_s=3.0).child(stop_grace_s=5.0))

    assert await supervisor.stop_child("a")

    assert journal == ["+a", "-a"]
    assert trio.current_time() == pytest.approx(3.0)
    assert supervisor.names() == ()


async def test_a_stopped_name_can_be_started_again_at_once(nursery: trio.Nursery) -> None:
    journal: list[str] = []
    supervisor = await started(nursery)
    await supervisor.start_child(Puppet("a", journal).child())

    await supervisor.stop_child("a")
    await supervisor.start_child(Puppet("a", journal).child())

    assert journal == ["+a", "-a", "+a"]


async def test_stopping_twice_and_stopping_an_unknown_child_are_harmless(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    supervisor = await started(nursery)
    await supervisor.start_child(Lingerer("a", journal, lingers_s=3.0).child(stop_grace_s=5.0))

    async with trio.open_nursery() as both:
        both.start_soon(supervisor.stop_child, "a")
        both.start_soon(supervisor.stop_child, "a")

    assert await supervisor.stop_child("a")
    assert await supervisor.stop_child("nobody")
    assert journal == ["+a", "-a"]


async def test_stop_returns_false_when_the_child_exceeds_its_grace(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = await started(nursery)
    await supervisor.start_child(Lingerer("a", [], lingers_s=10.0).child(stop_grace_s=2.0))

    assert not await supervisor.stop_child("a")

    assert trio.current_time() == pytest.approx(2.0)
    assert states(supervisor) == {"a": "overdue"}
    assert caplog.messages == ["child a is overdue: grace was 2.0 s"]
    await trio.sleep(8.5)
    assert supervisor.names() == ()


async def test_a_second_stop_does_not_report_an_overdue_child_again(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = await started(nursery)
    await supervisor.start_child(Lingerer("a", [], lingers_s=10.0).child(stop_grace_s=2.0))

    assert not await supervisor.stop_child("a")
    assert not await supervisor.stop_child("a")

    assert caplog.messages == ["child a is overdue: grace was 2.0 s"]


async def test_a_child_that_returned_is_reaped(nursery: trio.Nursery) -> None:
    supervisor = await started(nursery)
    cast = puppets("ab", [])
    for puppet in cast.values():
        await supervisor.start_child(puppet.child(Policy.TRANSIENT))

    await cast["a"].finish()

    assert supervisor.names() == ("b",)


async def test_a_crash_restarts_the_child_alone(nursery: trio.Nursery) -> None:
    journal: list[str] = []
    supervisor = await started(nursery)
    cast = puppets("ab", journal)
    for puppet in cast.values():
        await supervisor.start_child(puppet.child(Policy.TRANSIENT))

    await cast["a"].crash()

    assert journal == ["+a", "+b", "-a", "+a"]


async def test_a_child_that_is_backing_off_can_be_stopped(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    supervisor = await started(nursery)
    puppet = Puppet("a", journal)
    slow = Intensity(restarts_max=2, within_s=60.0, backoff_s=5.0)
    await supervisor.start_child(puppet.child(intensity=slow))
    await puppet.crash()
    assert states(supervisor) == {"a": "backing_off"}

    assert await supervisor.stop_child("a")

    assert trio.current_time() == 0.0
    await trio.sleep(6.0)
    assert journal == ["+a", "-a"]


async def test_the_stop_of_many_takes_as_long_as_the_slowest(autojump_clock: MockClock) -> None:
    journal: list[str] = []
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0)

    with trio.move_on_after(1.0):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            for name, lingers_s in (("a", 3.0), ("b", 2.0), ("c", 1.0)):
                lingerer = Lingerer(name, journal, lingers_s=lingers_s)
                await supervisor.start_child(lingerer.child(stop_grace_s=5.0))
            await trio.sleep_forever()

    assert journal[3:] == ["-c", "-b", "-a"]
    assert trio.current_time() == pytest.approx(4.0)


async def test_each_child_has_its_own_grace_when_all_stop_together(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0)

    async def run_for_one_second() -> None:
        with trio.move_on_after(1.0):
            await supervisor.run()

    nursery.start_soon(run_for_one_second)
    await wait_all_tasks_blocked()
    for name, stop_grace_s in (("a", 2.0), ("b", 3.0), ("c", 10.0)):
        lingerer = Lingerer(name, [], lingers_s=9.0)
        await supervisor.start_child(lingerer.child(stop_grace_s=stop_grace_s))
    await trio.sleep(4.5)

    assert states(supervisor) == {"a": "overdue", "b": "overdue", "c": "stopping"}
    await trio.sleep(8.0)
    assert supervisor.names() == ()
    assert caplog.messages == [
        "child a is overdue: grace was 2.0 s",
        "child b is overdue: grace was 3.0 s",
    ]


async def test_a_restarted_dynamic_supervisor_begins_empty_and_takes_children_again(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []
    before = Puppet("before", journal)
    runs = DynamicSupervisor("runs", stop_grace_s=30.0)
    outer = Supervisor(
        "outer", strategy=Strategy.REST_FOR_ONE, children=[before.child(), nest(runs)]
    )
    await nursery.start(outer.run)
    await runs.start_child(Puppet("a", journal).child())

    await before.crash()
    assert runs.names() == ()
    await runs.start_child(Puppet("a", journal).child())

    assert journal == ["+before", "+a", "-before", "-a", "+before", "+a"]


async def test_cancelling_a_start_leaves_the_child_with_the_supervisor(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(3.0)
        task_status.started()
        await trio.sleep_forever()

    supervisor = await started(nursery)

    with trio.move_on_after(1.0):
        await supervisor.start_child(Child("slow", run=slow, reports_ready=True))
    await trio.sleep(3.0)

    assert states(supervisor) == {"slow": "running"}


async def test_a_child_may_stop_itself(nursery: trio.Nursery) -> None:
    supervisor = await started(nursery)

    async def stop_myself() -> None:
        await supervisor.stop_child("a")

    await supervisor.start_child(Child("a", run=stop_myself))
    await wait_all_tasks_blocked()

    assert supervisor.names() == ()
