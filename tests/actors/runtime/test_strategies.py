"""Strategies: which siblings restart together, and in which order."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.runtime import Child, Intensity, Policy, Strategy, Supervisor
from tests.actors.runtime.toys import PROMPT, Lingerer, Puppet, puppets, states


async def started(nursery: trio.Nursery, cast: dict[str, Puppet], strategy: Strategy) -> Supervisor:
    children = [puppet.child() for puppet in cast.values()]
    supervisor = Supervisor("toys", strategy=strategy, children=children)
    await nursery.start(supervisor.run)
    return supervisor


@pytest.mark.parametrize(
    ("strategy", "restart"),
    [
        (Strategy.ONE_FOR_ONE, "-b +b"),
        (Strategy.ONE_FOR_ALL, "-b -d -c -a +a +b +c +d"),
        (Strategy.REST_FOR_ONE, "-b -d -c +b +c +d"),
    ],
)
async def test_siblings_stop_last_first_and_start_in_order(
    nursery: trio.Nursery, strategy: Strategy, restart: str
) -> None:
    journal: list[str] = []
    cast = puppets("abcd", journal)
    await started(nursery, cast, strategy)

    await cast["b"].crash()

    assert " ".join(journal) == "+a +b +c +d " + restart


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE])
async def test_siblings_wait_for_the_back_off_of_the_child_that_crashed(
    autojump_clock: MockClock, nursery: trio.Nursery, strategy: Strategy
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    slow = Intensity(restarts_max=2, within_s=60.0, backoff_s=5.0)
    children = [cast["a"].child(intensity=slow), cast["b"].child()]
    supervisor = Supervisor("toys", strategy=strategy, children=children)
    await nursery.start(supervisor.run)

    await cast["a"].crash()

    assert states(supervisor) == {"a": "backing_off", "b": "waiting"}
    await trio.sleep(4.9)
    assert journal[-1] == "-b"
    await trio.sleep(0.2)
    assert journal[-2:] == ["+a", "+b"]


async def test_one_for_all_keeps_the_start_order_through_the_back_off(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    slow = Intensity(restarts_max=2, within_s=60.0, backoff_s=5.0)
    children = [cast["a"].child(), cast["b"].child(intensity=slow)]
    supervisor = Supervisor("toys", strategy=Strategy.ONE_FOR_ALL, children=children)
    await nursery.start(supervisor.run)

    await cast["b"].crash()

    assert journal == ["+a", "+b", "-b", "-a"]
    await trio.sleep(5.1)
    assert journal[4:] == ["+a", "+b"]


async def test_under_one_for_one_a_sibling_in_back_off_delays_no_other_child(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    slow = Intensity(restarts_max=2, within_s=60.0, backoff_s=5.0)
    children = [cast["a"].child(intensity=slow), cast["b"].child()]
    supervisor = Supervisor("toys", strategy=Strategy.ONE_FOR_ONE, children=children)
    await nursery.start(supervisor.run)

    await cast["a"].crash()
    await cast["b"].crash()

    assert journal == ["+a", "+b", "-a", "-b", "+b"]
    await trio.sleep(5.1)
    assert journal[5:] == ["+a"]


async def test_children_that_crash_together_restart_in_order(nursery: trio.Nursery) -> None:
    journal: list[str] = []
    cast = puppets("abc", journal)
    supervisor = await started(nursery, cast, Strategy.REST_FOR_ONE)

    cast["b"]._orders.send_nowait(RuntimeError("both"))
    await cast["a"].crash()

    assert set(states(supervisor).values()) == {"running"}
    assert [line for line in journal if line[0] == "+"][-3:] == ["+a", "+b", "+c"]


async def test_a_temporary_sibling_that_was_stopped_with_others_is_not_restarted(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []
    cast = puppets("abc", journal)
    children = [cast["a"].child(), cast["b"].child(Policy.TEMPORARY), cast["c"].child()]
    supervisor = Supervisor("toys", strategy=Strategy.REST_FOR_ONE, children=children)
    await nursery.start(supervisor.run)

    await cast["a"].crash()

    assert journal[3:] == ["-a", "-c", "-b", "+a", "+c"]


async def test_a_child_that_has_finished_is_not_restarted_by_a_siblings_crash(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    children = [cast["a"].child(), cast["b"].child(Policy.TRANSIENT)]
    supervisor = Supervisor("toys", strategy=Strategy.ONE_FOR_ALL, children=children)
    await nursery.start(supervisor.run)

    await cast["b"].finish()
    await cast["a"].crash()

    assert journal == ["+a", "+b", "-b", "-a", "+a"]
    assert states(supervisor) == {"a": "running", "b": "finished"}


async def test_a_child_that_finishes_while_its_sibling_crashes_is_not_restarted(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    children = [cast["a"].child(), cast["b"].child(Policy.TRANSIENT)]
    supervisor = Supervisor("toys", strategy=Strategy.REST_FOR_ONE, children=children)
    await nursery.start(supervisor.run)

    cast["b"]._orders.send_nowait(None)
    await cast["a"].crash()

    assert states(supervisor) == {"a": "running", "b": "finished"}


async def test_a_sibling_that_is_slow_to_stop_is_restarted_only_after_it_has_ended(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    living: list[int] = []

    async def linger() -> None:
        living.append(len(living))
        assert len(living) == 1
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(7.0)
            living.pop()

    puppet = Puppet("a", [])
    lingerer = Child("b", run=linger, stop_grace_s=1.0, intensity=PROMPT)
    children = [puppet.child(), lingerer]
    supervisor = Supervisor("toys", strategy=Strategy.REST_FOR_ONE, children=children)
    await nursery.start(supervisor.run)

    await puppet.crash()
    await trio.sleep(2.0)

    assert states(supervisor) == {"a": "backing_off", "b": "overdue"}
    await trio.sleep(6.0)
    await wait_all_tasks_blocked()
    assert states(supervisor) == {"a": "running", "b": "running"}


async def test_a_siblings_crash_does_not_shorten_a_back_off(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    slow = Intensity(restarts_max=2, within_s=60.0, backoff_s=5.0)
    children = [cast["a"].child(), cast["b"].child(intensity=slow)]
    supervisor = Supervisor("toys", strategy=Strategy.REST_FOR_ONE, children=children)
    await nursery.start(supervisor.run)

    await cast["b"].crash()
    await cast["a"].crash()

    assert states(supervisor) == {"a": "running", "b": "waiting"}
    await trio.sleep(5.1)
    assert states(supervisor) == {"a": "running", "b": "running"}


async def test_no_child_restarts_while_an_earlier_one_is_down(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []
    cast = puppets("ab", journal)
    lingerer = Lingerer("c", journal, lingers_s=3.0)
    children = [cast["a"].child(), cast["b"].child(), lingerer.child(stop_grace_s=5.0)]
    supervisor = Supervisor("toys", strategy=Strategy.REST_FOR_ONE, children=children)
    await nursery.start(supervisor.run)

    await cast["b"].crash()
    await cast["a"].crash()
    await trio.sleep(3.1)

    assert " ".join(journal) == "+a +b +c -b -a -c +a +b +c"
