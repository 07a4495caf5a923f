"""Supervisor and DynamicSupervisor: they start, restart and stop children.

A Supervisor has a fixed list of children. It starts them in order, restarts them by its strategy
and stops them in reverse. Rules:
1. A child starts once every child before it is ready. Under ONE_FOR_ONE, a child that ran and
   crashed does not wait for the others.
2. However the supervisor ends (cancelled, exhausted, finished), it stops its children in reverse
   order, shielded, each within its own grace (actors/runtime/child.py states what a grace can do).
3. A child that ended without a restart stays down. So does a TEMPORARY child that was stopped for
   a sibling.
4. When every child has ended permanently, the supervisor returns.

The children of a DynamicSupervisor are started and stopped by name while it runs. Rules:
1. Children are independent of each other. Each is restarted alone, by its own intensity. When the
   supervisor ends, all are asked to stop at once, newest first, each within its own grace.
2. A child that ends permanently is removed: its name is free again when nothing of it runs.
3. A child that has used up its restarts crashes the supervisor, or is dropped and logged
   (`OnExhausted`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, TypeAlias, assert_never

import trio

from actors.runtime.child import (
    Child,
    ChildState,
    DoNotRestart,
    GiveUp,
    Policy,
    Restart,
    State,
    Strategy,
    ask_to_stop,
    exhaustion_error,
    run_once,
    siblings_of,
    stop_in_turn,
    stop_together,
    unwrapping_group,
    wait_ended,
)

log = logging.getLogger(__name__)

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
        self._records: tuple[ChildState, ...] = ()
        self._changed = trio.Event()
        # Set when the supervisor begins to stop for any reason.
        self.stopping = trio.Event()
        names = [child.name for child in self.children]
        assert len(set(names)) == len(names), f"{name} has two children of one name: {names}"

    @property
    def stop_grace_s(self) -> float:
        return math.fsum(child.stop_grace_s for child in self.children)

    def records(self) -> Sequence[ChildState]:
        return self._records

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervises the children until cancelled, or until all have ended permanently.

        Raises `RestartsExhausted` from the last crash of a child that used up its restarts.
        """
        self._open()
        exhausted: ChildState | None = None
        with unwrapping_group():
            async with trio.open_nursery() as nursery:
                try:
                    exhausted = await self._supervise(nursery, task_status)
                finally:
                    await self._stop()
        if exhausted is not None:
            self.state = State.FAILED
            raise exhaustion_error(self.name, exhausted)

    def _open(self) -> None:
        assert self.state in RESTING, f"{self.name} is running already"
        self.state = State.STARTING
        self.stopping = trio.Event()
        self.started_at = trio.current_time()
        self._records = tuple(ChildState(child, on_change=self._wake) for child in self.children)

    async def _stop(self) -> None:
        self.state = State.STOPPING
        self.stopping.set()
        # Shielded: a cancelled supervisor must still stop its children in order.
        with trio.CancelScope(shield=True):
            await stop_in_turn(reversed(self._records))
        self.state = State.STOPPED

    async def _supervise(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]
    ) -> ChildState | None:
        """Returns the child that used up its restarts, or None when every child has ended
        permanently."""
        while True:
            for record in self._records:
                if record.has_ended_by_itself and not await self._apply_decision(record):
                    return record
            if self.state is State.STARTING and all(map(_is_up, self._records)):
                self.state = State.RUNNING
                task_status.started()
            if all(record.is_over for record in self._records):
                return None
            # A cancelled supervisor must not start another child.
            await trio.lowlevel.checkpoint_if_cancelled()
            self._start_due(nursery)
            await self._wait_change()

    async def _apply_decision(self, record: ChildState) -> bool:
        """Applies the restart decision. Returns False if the child has used up its restarts."""
        now = trio.current_time()
        match record.judge(now):
            case DoNotRestart():
                record.state = State.FINISHED
            case GiveUp():
                record.state = State.FAILED
                return False
            case Restart(after_s):
                record.schedule_restart(now, after_s)
                await self._stop_siblings(record)
            case verdict:
                assert_never(verdict)
        return True

    async def _stop_siblings(self, record: ChildState) -> None:
        """Stops the siblings that restart together with a child, and marks them as waiting."""
        indexes = siblings_of(self.strategy, self._records.index(record), len(self._records))
        siblings = [self._records[index] for index in indexes]
        # A sibling that ended by itself meanwhile gets its own restart decision.
        affected = [s for s in siblings if not (s.is_over or s.has_ended_by_itself)]
        await stop_in_turn(reversed(affected))
        for sibling in affected:
            if sibling.child.restart is not Policy.TEMPORARY:
                sibling.state = State.WAITING
                # Not before the back-off of the crashed child has ended.
                sibling.start_at = max(sibling.start_at, record.start_at)

    def _start_due(self, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        for record in self._next_to_start():
            if record.start_at <= now:
                record.begin(now)
                nursery.start_soon(_run_and_end, record, name=f"{self.name}/{record.child.name}")

    async def _wait_change(self) -> None:
        # Wakes for the next due start, or when a child changes.
        due = (record.start_at for record in self._next_to_start())
        with trio.move_on_at(min(due, default=math.inf)):
            await self._changed.wait()
        self._changed = trio.Event()

    def _next_to_start(self) -> Iterator[ChildState]:
        """Yields the children to start, in order, each once those before it are up. A child that
        crashed alone does not wait."""
        are_up = True
        for record in self._records:
            is_alone = record.state is State.BACKING_OFF and self.strategy is Strategy.ONE_FOR_ONE
            if is_alone or (are_up and record.is_startable):
                yield record
            are_up = are_up and _is_up(record)

    def _wake(self) -> None:
        self._changed.set()


async def _run_and_end(record: ChildState) -> None:
    try:
        await run_once(record)
    finally:  # On a KeyboardInterrupt too.
        record.end()


def _is_up(record: ChildState) -> bool:
    """Returns whether later children need not wait for it: it runs, or it will not run again."""
    return record.is_over or (record.state is State.RUNNING and record.is_alive)


# Dropped children that inspection still shows. More of them would only use memory.
FAILED_KEPT_MAX = 16

GiveUpHook: TypeAlias = Callable[[str, Exception | None], None]


class NameTaken(Exception):
    """A child of that name runs, or has not finished stopping."""


class NotSupervising(Exception):
    """The supervisor accepts no children: it is not running, or it is stopping."""


class NeverReady(Exception):
    """A child ended permanently before it reported ready. The cause is its last crash."""


class OnExhausted(Enum):
    """What happens to a child that has used up its restarts."""

    # The supervisor crashes with RestartsExhausted.
    ESCALATE = "escalate"
    # The child is dropped and logged; its siblings are not affected.
    DROP = "drop"


def _ignore_give_up(name: str, error: Exception | None) -> None:
    del name, error


class DynamicSupervisor:
    """Children by name. `stop_grace_s` is the longest grace that a child may have."""

    kind: Final = "dynamic"

    def __init__(
        self,
        name: str,
        *,
        stop_grace_s: float,
        exhaustion: OnExhausted = OnExhausted.ESCALATE,
        on_give_up: GiveUpHook = _ignore_give_up,
    ) -> None:
        self.name = name
        self.stop_grace_s = stop_grace_s
        self.state = State.WAITING
        self.started_at: float | None = None
        self._exhaustion = exhaustion
        self._on_give_up = on_give_up
        self._nursery: trio.Nursery | None = None
        self._records: dict[str, ChildState] = {}
        self._failed: dict[str, ChildState] = {}  # For inspection only; bounded.
        self._ended_restarts = 0
        self._exhausted: ChildState | None = None
        self._exhausted_event = trio.Event()

    def records(self) -> Sequence[ChildState]:
        return (*self._failed.values(), *self._records.values())

    @property
    def restart_count(self) -> int:
        """Restarts of all children, those that have ended too."""
        return self._ended_restarts + sum(record.restart_count for record in self._records.values())

    def names(self) -> tuple[str, ...]:
        """Returns the children that have not ended, including those that back off or stop."""
        return tuple(sorted(self._records))

    async def start_child(self, child: Child) -> None:
        """Starts a child and returns once it is ready.

        Raises `NameTaken`, `NotSupervising` or `NeverReady`. If the caller is cancelled meanwhile,
        the child continues: it belongs to the supervisor.
        """
        if self._nursery is None:
            raise NotSupervising(f"{self.name} cannot start {child.name}: it is {self.state.value}")
        if child.name in self._records:
            raise NameTaken(f"{self.name} has a child {child.name} already")
        assert child.stop_grace_s <= self.stop_grace_s, f"{child.name} wants too long a grace"
        record = ChildState(child)
        record.begin(trio.current_time())
        self._failed.pop(child.name, None)
        # Before the first await, so that a concurrent start of the same name raises NameTaken.
        self._records[child.name] = record
        self._nursery.start_soon(self._keep, record, name=f"{self.name}/{child.name}")
        await record.settled.wait()
        if record.ready_at is None:
            raise NeverReady(f"{child.name} ended before it was ready") from record.last_error

    async def stop_child(self, name: str) -> bool:
        """Stops a child. Returns True once nothing of it runs, including its shielded clean-up.

        Returns False if its grace has passed: it is then overdue, logged, and listed until it ends.
        Safe to repeat; an unknown name counts as stopped.
        """
        record = self._records.get(name)
        if record is None:
            await trio.lowlevel.checkpoint()
            return True
        ask_to_stop(record)
        return await wait_ended(record, until=trio.current_time() + record.child.stop_grace_s)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervises children until cancelled.

        Raises `RestartsExhausted` from the last crash of a child that used up its restarts, unless
        such children are dropped.
        """
        self._open()
        with unwrapping_group():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    task_status.started()
                    await self._exhausted_event.wait()
                finally:
                    await self._stop()
        if self._exhausted is not None:
            self.state = State.FAILED
            raise exhaustion_error(self.name, self._exhausted)

    def _open(self) -> None:
        assert self._nursery is None, f"{self.name} is running already"
        assert not self._records
        self.state = State.RUNNING
        self.started_at = trio.current_time()
        self._failed.clear()
        self._exhausted = None
        self._exhausted_event = trio.Event()

    async def _stop(self) -> None:
        self.state = State.STOPPING
        # From now on `start_child` raises NotSupervising, so no child can start behind the stop.
        self._nursery = None
        with trio.CancelScope(shield=True):
            await stop_together(reversed(tuple(self._records.values())))
        self.state = State.STOPPED

    async def _keep(self, record: ChildState) -> None:
        try:
            await self._run_until_over(record)
        finally:
            # Removed before `end` is announced, so that a waiting task may reuse the name.
            del self._records[record.child.name]
            self._ended_restarts += record.restart_count
            record.end()

    async def _run_until_over(self, record: ChildState) -> None:
        while True:
            await run_once(record)
            if record.is_stopping or not await self._is_due_again(record):
                return
            record.begin(trio.current_time())

    async def _is_due_again(self, record: ChildState) -> bool:
        """Decides about a child that ended by itself, and waits for its back-off if it restarts."""
        now = trio.current_time()
        match record.judge(now):
            case DoNotRestart():
                record.state = State.FINISHED
            case GiveUp():
                self._give_up(record)
            case Restart(after_s):
                record.schedule_restart(now, after_s)
                # As the child's scope, so that `stop_child` also interrupts the back-off.
                with trio.CancelScope(shield=True) as record.scope:
                    await trio.sleep(after_s)
                return not record.is_stopping
            case verdict:
                assert_never(verdict)
        return False

    def _give_up(self, record: ChildState) -> None:
        record.state = State.FAILED
        name = record.child.name
        log.critical("%s gave up on child %s", self.name, name, extra={"child": name})
        self._remember_failed(record)
        match self._exhaustion:
            case OnExhausted.DROP:
                self._on_give_up(name, record.crash)
            case OnExhausted.ESCALATE:
                self._exhausted = record
                self._exhausted_event.set()
            case _:
                assert_never(self._exhaustion)

    def _remember_failed(self, record: ChildState) -> None:
        self._failed[record.child.name] = record
        while len(self._failed) > FAILED_KEPT_MAX:
            del self._failed[next(iter(self._failed))]
