"""FairTurns: callers take turns, and one caller gets no more than its part."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from actors.limiters.fair_turns import FairTurns
from conveyor.domain.ids import CallerId

ONE, OTHER = CallerId("one"), CallerId("other")


async def test_each_caller_starts_once_before_another_starts_twice() -> None:
    turns = FairTurns(at_once_max=4, caller_max=4)

    chosen = turns.choose([("a", ONE), ("b", ONE), ("c", ONE), ("d", OTHER)], [])

    assert chosen == [("a", ONE), ("d", OTHER), ("b", ONE), ("c", ONE)]


async def test_the_caller_that_was_served_longest_ago_comes_first(
    autojump_clock: MockClock,
) -> None:
    turns = FairTurns(at_once_max=1, caller_max=1)
    due = [("a", ONE), ("b", OTHER)]
    served = []
    for _ in range(4):
        served += turns.choose(due, [])
        await trio.sleep(1)

    assert served == [("a", ONE), ("b", OTHER), ("a", ONE), ("b", OTHER)]


async def test_a_caller_gets_no_more_than_its_part() -> None:
    turns = FairTurns(at_once_max=4, caller_max=2)

    assert turns.choose([("a", ONE), ("b", ONE), ("c", ONE)], []) == [("a", ONE), ("b", ONE)]
    assert turns.choose([("c", ONE), ("d", OTHER)], [ONE, ONE]) == [("d", OTHER)]


async def test_nothing_starts_while_everything_is_in_progress() -> None:
    turns = FairTurns(at_once_max=2, caller_max=2)

    assert turns.choose([("a", ONE)], [OTHER, OTHER]) == []
