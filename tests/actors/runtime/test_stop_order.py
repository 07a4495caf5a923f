"""Stopping: children stop in reverse order, each within its grace, and some exceed it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.runtime import Child, Strategy, Supervisor, nest
from actors.runtime.child import REMINDER_S, ChildState, ask_to_stop, run_once
from tests.actors.runtime.toys import Boom, Lingerer, Puppet, puppets, states


def one_for_one(*children: Child, name: str = "toys") -> Supervisor:
    return Supervisor(name, strategy=Strategy.ONE_FOR_ONE, children=children)


async def run_and_cancel_at(supervisor: Supervisor, at_s: float) -> float:
    """Returns how long the stop took."""
    with trio.move_on_after(at_s) as scope:
        await supervisor.run()
    assert scope.cancelled_caught
    return trio.current_time() - scope.deadline


# The test runs ten times, because a plain nursery would sometimes stop in the right order by
# chance.
@pytest.mark.parametrize("attempt", range(10))
async def test_children_start_in_order_and_stop_last_first(
    autojump_clock: MockClock, attempt: int
) -> None:
    journal: list[str] = []
    supervisor = one_for_one(*(puppet.child() for puppet in puppets("abcd", journal).values()))

    await run_and_cancel_at(supervisor, 1.0)

    assert " ".join(journal) == "+a +b +c +d -d -c -b -a"
    assert set(states(supervisor).values()) == {"stopped"}


async def test_a_child_is_stopped_only_when_the_one_after_it_has_cleaned_up(
    autojump_clock: MockClock,
) -> None:
    journal: list[str] = []
    slow = Lingerer("slow", journal, lingers_s=3.0)
    supervisor = one_for_one(
        Puppet("first", journal).child(),
        slow.child(stop_grace_s=4.0),
        Puppet("last", journal).child(),
    )

    took_s = await run_and_cancel_at(supervisor, 1.0)

    assert journal[3:] == ["-last", "-slow", "-first"]
    assert took_s == pytest.approx(3.0)


async def test_a_nested_supervisor_stops_its_children_before_earlier_siblings_stop(
    autojump_clock: MockClock,
) -> None:
    journal: list[str] = []
    cast = puppets("abcd", journal)
    inner = one_for_one(cast["b"].child(), cast["c"].child(), name="inner")
    outer = one_for_one(cast["a"].child(), nest(inner), cast["d"].child())

    await run_and_cancel_at(outer, 1.0)

    assert " ".join(journal) == "+a +b +c +d -d -c -b -a"


async def test_an_overdue_child_is_reported_and_does_not_delay_the_others(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    journal: list[str] = []
    stubborn = Lingerer("stubborn", journal, lingers_s=20.0)
    supervisor = one_for_one(
        Puppet("first", journal).child(),
        stubborn.child(stop_grace_s=2.0),
        Puppet("last", journal).child(),
    )
    took: list[float] = []

    async def run() -> None:
        took.append(await run_and_cancel_at(supervisor, 1.0))

    nursery.start_soon(run)
    await trio.sleep(4.0)

    assert journal[3:] == ["-last", "-first"]
    assert states(supervisor) == {"first": "stopped", "stubborn": "overdue", "last": "stopped"}
    assert caplog.messages == ["child stubborn is overdue: grace was 2.0 s"]
    await trio.sleep(20.0)
    assert took == [pytest.approx(20.0)]
    assert states(supervisor)["stubborn"] == "stopped"


async def test_a_child_that_ends_within_its_grace_is_not_reported(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = Lingerer("prompt", [], lingers_s=1.9)

    await run_and_cancel_at(one_for_one(prompt.child(stop_grace_s=2.0)), 1.0)

    assert caplog.messages == []


async def test_an_overdue_child_does_not_get_its_grace_twice(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    crashing = Puppet("crashing", journal)
    supervisor = Supervisor(
        "toys",
        strategy=Strategy.REST_FOR_ONE,
        children=[
            Puppet("first", journal).child(),
            crashing.child(),
            Lingerer("stubborn", journal, lingers_s=20.0).child(stop_grace_s=5.0),
        ],
    )
    nursery.start_soon(run_and_cancel_at, supervisor, 7.0)
    await wait_all_tasks_blocked()

    await crashing.crash()
    await trio.sleep(6.9)
    assert states(supervisor)["stubborn"] == "overdue"
    await trio.sleep(0.2)

    assert journal[-1] == "-first"
    await trio.sleep(13.0)
    assert journal[-1] == "-stubborn"


async def test_a_long_overdue_child_is_reported_repeatedly(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn = Lingerer("stubborn", [], lingers_s=1.0 + 2.5 * REMINDER_S)

    await run_and_cancel_at(one_for_one(stubborn.child(stop_grace_s=1.0)), 1.0)

    assert caplog.messages == ["child stubborn is overdue: grace was 1.0 s"] * 3


async def test_cancellation_is_raised_in_the_caller_of_the_supervisor(
    autojump_clock: MockClock,
) -> None:
    reached: list[str] = []

    with trio.move_on_after(1.0) as scope:
        await one_for_one(Puppet("a", []).child()).run()
        reached.append("beyond")

    assert scope.cancelled_caught
    assert reached == []


async def test_a_crash_during_a_stop_is_logged_and_the_stop_continues(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    journal: list[str] = []

    async def crash_when_stopped() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Boom("on the way out")

    supervisor = one_for_one(Puppet("a", journal).child(), Child("rude", run=crash_when_stopped))

    await run_and_cancel_at(supervisor, 1.0)

    assert journal == ["+a", "-a"]
    assert caplog.messages == ["child rude crashed: Boom('on the way out')"]
    assert states(supervisor)["rude"] == "stopped"


async def test_a_crash_among_cancelled_tasks_of_a_child_counts_as_a_crash(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash_when_stopped() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Boom("in a group")

    async def mixed() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash_when_stopped)
            nursery.start_soon(trio.sleep_forever)

    await run_and_cancel_at(one_for_one(Child("mixed", run=mixed)), 1.0)

    assert caplog.messages == ["child mixed crashed: Boom('in a group')"]


async def test_a_stop_during_the_back_off_starts_no_child(autojump_clock: MockClock) -> None:
    journal: list[str] = []

    async def crash() -> None:
        journal.append("crash")
        raise Boom

    supervisor = one_for_one(Child("a", run=crash), Child("b", run=crash))

    await run_and_cancel_at(supervisor, 0.05)

    assert set(journal) == {"crash"}
    assert set(states(supervisor).values()) == {"stopped"}


async def test_a_late_readiness_report_does_not_undo_a_stop(autojump_clock: MockClock) -> None:
    seen: list[dict[str, str]] = []

    async def late(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            task_status.started()
            seen.append(states(supervisor))

    supervisor = one_for_one(Child("late", run=late, reports_ready=True))
    await run_and_cancel_at(supervisor, 1.0)

    assert seen == [{"late": "stopping"}]


async def test_a_supervisor_can_run_again_after_a_stop(autojump_clock: MockClock) -> None:
    journal: list[str] = []
    supervisor = one_for_one(Puppet("a", journal).child())

    await run_and_cancel_at(supervisor, 1.0)
    await run_and_cancel_at(supervisor, 1.0)

    assert journal == ["+a", "-a", "+a", "-a"]


async def test_a_child_stopped_before_its_first_step_never_runs() -> None:
    journal: list[str] = []
    slot = ChildState(Puppet("a", journal).child())
    slot.begin(trio.current_time())

    ask_to_stop(slot)
    await run_once(slot)

    assert journal == []


async def test_a_supervisor_cancelled_before_it_runs_starts_no_child() -> None:
    journal: list[str] = []

    with trio.CancelScope() as scope:
        scope.cancel()
        await one_for_one(Puppet("a", journal).child()).run()

    assert journal == []
