"""The dynamic supervisor gives up on a child: it escalates, or it drops the child alone."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.runtime import (
    Child,
    DynamicSupervisor,
    Intensity,
    OnExhausted,
    RestartsExhausted,
    State,
    Strategy,
    Supervisor,
    nest,
)
from actors.runtime.supervisor import FAILED_KEPT_MAX
from tests.actors.runtime.toys import PROMPT, Boom, Puppet, puppets, states

NEVER = Intensity(restarts_max=0)


async def crash_at_once() -> None:
    raise Boom


async def test_repeated_crashes_of_one_child_do_not_affect_the_others_until_it_is_given_up(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    before: list[str] = []
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0)
    storm = Intensity(restarts_max=4, within_s=60.0, backoff_s=1.0)

    async def crash_repeatedly() -> None:
        await wait_all_tasks_blocked()
        for puppet in puppets("ab", journal).values():
            await supervisor.start_child(puppet.child())
        await supervisor.start_child(Child("storm", run=crash_at_once, intensity=storm))
        await trio.sleep(14.9)
        before.extend(journal)

    nursery.start_soon(crash_repeatedly)
    with pytest.raises(RestartsExhausted) as raised:
        await supervisor.run()

    assert trio.current_time() == pytest.approx(15.0)
    assert isinstance(raised.value.__cause__, Boom)
    assert before == ["+a", "+b"]
    assert sorted(journal) == ["+a", "+b", "-a", "-b"]


async def test_an_exhausted_child_can_be_dropped_alone_with_a_log_line(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    given_up: list[tuple[str, Exception | None]] = []
    supervisor = DynamicSupervisor(
        "runs",
        stop_grace_s=30.0,
        exhaustion=OnExhausted.DROP,
        on_give_up=lambda name, error: given_up.append((name, error)),
    )
    await nursery.start(supervisor.run)
    puppet, crash = Puppet("a", []), Boom("enough")
    await supervisor.start_child(puppet.child(intensity=NEVER))
    await supervisor.start_child(Puppet("b", []).child())

    await puppet.crash(crash)

    assert given_up == [("a", crash)]
    assert supervisor.names() == ("b",)
    assert states(supervisor) == {"a": "failed", "b": "running"}
    assert "runs gave up on child a" in caplog.messages


async def test_a_dropped_child_can_be_started_again(nursery: trio.Nursery) -> None:
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0, exhaustion=OnExhausted.DROP)
    await nursery.start(supervisor.run)
    await supervisor.start_child(Child("a", run=crash_at_once, intensity=NEVER))
    await wait_all_tasks_blocked()

    await supervisor.start_child(Puppet("a", []).child())

    assert [record.state.value for record in supervisor.records()] == ["running"]


async def test_the_number_of_remembered_failed_children_is_bounded(nursery: trio.Nursery) -> None:
    supervisor = DynamicSupervisor("runs", stop_grace_s=30.0, exhaustion=OnExhausted.DROP)
    await nursery.start(supervisor.run)

    for number in range(FAILED_KEPT_MAX + 3):
        await supervisor.start_child(Child(f"{number}", run=crash_at_once, intensity=NEVER))
    await wait_all_tasks_blocked()

    assert len(supervisor.records()) == FAILED_KEPT_MAX
    assert "0" not in states(supervisor)


async def test_a_hook_that_fails_crashes_the_supervisor_after_an_orderly_stop(
    nursery: trio.Nursery,
) -> None:
    def broken_hook(name: str, error: Exception | None) -> None:
        raise ValueError(name)

    journal: list[str] = []
    supervisor = DynamicSupervisor(
        "runs", stop_grace_s=30.0, exhaustion=OnExhausted.DROP, on_give_up=broken_hook
    )

    async def start_both() -> None:
        await wait_all_tasks_blocked()
        await supervisor.start_child(Puppet("b", journal).child())
        await supervisor.start_child(Child("a", run=crash_at_once, intensity=NEVER))

    nursery.start_soon(start_both)
    with pytest.raises(ValueError, match="a"):
        await supervisor.run()

    assert journal == ["+b", "-b"]


async def test_an_escalation_leaves_nothing_behind_for_the_next_run(nursery: trio.Nursery) -> None:
    runs = DynamicSupervisor("runs", stop_grace_s=30.0)
    outer = Supervisor(
        "outer", strategy=Strategy.ONE_FOR_ONE, children=[nest(runs, intensity=PROMPT)]
    )
    await nursery.start(outer.run)

    await runs.start_child(Child("a", run=crash_at_once, intensity=NEVER))
    await wait_all_tasks_blocked()

    assert outer.records()[0].restart_count == 1
    assert runs.state is State.RUNNING
    assert runs.records() == ()
