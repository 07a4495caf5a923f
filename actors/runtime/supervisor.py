"""Supervisor: starts its children in order, restarts them by its strategy, stops them in reverse.

Rules:
1. A child starts once every child before it is ready. Under ONE_FOR_ONE, a child that ran and
   crashed does not wait for the others.
2. However the supervisor ends (cancelled, exhausted, finished), it stops its children in reverse
   order, shielded, each within its own grace (actors/runtime/child.py states what a grace can do).
3. A child that ended without a restart stays down. So does a TEMPORARY child that was stopped for
   a sibling.
4. When every child has ended permanently, the supervisor returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, assert_never

import trio

from actors.runtime.child import (
    Child,
    ChildState,
    State,
    exhausted,
    run_once,
    stop_in_turn,
    unwrapping_group,
)
from actors.runtime.restart import DoNotRestart, GiveUp, Policy, Restart, Strategy, siblings_of

RESTING: Final = frozenset({State.WAITING, State.STOPPED, State.FAILED, State.FINISHED})


class Supervisor:
    """A fixed list of children under one strategy."""

    kind: Final = "supervisor"

    def __init__(self, name: str, *, strategy: Strategy, children: Iterable[Child]) -> None:
        self.name = name
        self.strategy = strategy
        self.children = tuple(children)
        self.state = State.WAITING
        self.started_at: float | None = None
        self._slots: tuple[ChildState, ...] = ()
        self._changed = trio.Event()
        # Set when the supervisor begins to stop for any reason.
        self.stopping = trio.Event()
        names = [child.name for child in self.children]
        assert len(set(names)) == len(names), f"{name} has two children of one name: {names}"

    @property
    def stop_grace_s(self) -> float:
        return math.fsum(child.stop_grace_s for child in self.children)

    def slots(self) -> Sequence[ChildState]:
        return self._slots

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervises the children until cancelled, or until all have ended permanently.

        Raises `RestartsExhausted` from the last crash of a child that used up its restarts.
        """
        self._open()
        given_up: ChildState | None = None
        with unwrapping_group():
            async with trio.open_nursery() as nursery:
                try:
                    given_up = await self._supervise(nursery, task_status)
                finally:
                    await self._stop()
        if given_up is not None:
            self.state = State.FAILED
            raise exhausted(self.name, given_up)

    def _open(self) -> None:
        assert self.state in RESTING, f"{self.name} is running already"
        self.state = State.STARTING
        self.stopping = trio.Event()
        self.started_at = trio.current_time()
        self._slots = tuple(ChildState(child, on_change=self._wake) for child in self.children)

    async def _stop(self) -> None:
        self.state = State.STOPPING
        self.stopping.set()
        # Shielded: a cancelled supervisor must still stop its children in order.
        with trio.CancelScope(shield=True):
            await stop_in_turn(reversed(self._slots))
        self.state = State.STOPPED

    async def _supervise(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]
    ) -> ChildState | None:
        """Returns the child that used up its restarts, or None when every child has ended
        permanently."""
        while True:
            for slot in self._slots:
                if slot.has_ended_by_itself and not await self._deal_with(slot):
                    return slot
            if self.state is State.STARTING and all(map(_is_up, self._slots)):
                self.state = State.RUNNING
                task_status.started()
            if all(slot.is_over for slot in self._slots):
                return None
            # A cancelled supervisor must not start another child.
            await trio.lowlevel.checkpoint_if_cancelled()
            self._start_due(nursery)
            await self._wait_change()

    async def _deal_with(self, slot: ChildState) -> bool:
        """Applies the restart decision. Returns False if the child has used up its restarts."""
        now = trio.current_time()
        match slot.judge(now):
            case DoNotRestart():
                slot.state = State.FINISHED
            case GiveUp():
                slot.state = State.FAILED
                return False
            case Restart(after_s):
                slot.schedule_restart(now, after_s)
                await self._stop_siblings(slot)
            case verdict:
                assert_never(verdict)
        return True

    async def _stop_siblings(self, slot: ChildState) -> None:
        """Stops the siblings that restart together with a child, and marks them as waiting."""
        indexes = siblings_of(self.strategy, self._slots.index(slot), len(self._slots))
        siblings = [self._slots[index] for index in indexes]
        # A sibling that ended by itself meanwhile gets its own restart decision.
        affected = [s for s in siblings if not (s.is_over or s.has_ended_by_itself)]
        await stop_in_turn(reversed(affected))
        for sibling in affected:
            if sibling.child.restart is not Policy.TEMPORARY:
                sibling.state = State.WAITING
                # Not before the back-off of the crashed child has ended.
                sibling.start_at = max(sibling.start_at, slot.start_at)

    def _start_due(self, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        for slot in self._next_to_start():
            if slot.start_at <= now:
                slot.begin(now)
                nursery.start_soon(_live, slot, name=f"{self.name}/{slot.child.name}")

    async def _wait_change(self) -> None:
        # Wakes for the next due start, or when a child changes.
        due = (slot.start_at for slot in self._next_to_start())
        with trio.move_on_at(min(due, default=math.inf)):
            await self._changed.wait()
        self._changed = trio.Event()

    def _next_to_start(self) -> Iterator[ChildState]:
        """Yields the children to start, in order, each once those before it are up. A child that
        crashed alone does not wait."""
        are_up = True
        for slot in self._slots:
            is_alone = slot.state is State.BACKING_OFF and self.strategy is Strategy.ONE_FOR_ONE
            if is_alone or (are_up and slot.is_startable):
                yield slot
            are_up = are_up and _is_up(slot)

    def _wake(self) -> None:
        self._changed.set()


async def _live(slot: ChildState) -> None:
    try:
        await run_once(slot)
    finally:  # On a KeyboardInterrupt too.
        slot.end()


def _is_up(slot: ChildState) -> bool:
    """Returns whether later children need not wait for it: it runs, or it will not run again."""
    return slot.is_over or (slot.state is State.RUNNING and slot.is_alive)
