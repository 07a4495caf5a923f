"""DynamicSupervisor: children that are started and stopped by name while it runs.

Rules:
1. Children are independent of each other. Each is restarted alone, by its own intensity. When the
   supervisor ends, all are asked to stop at once, newest first, each within its own grace.
2. A child that ends permanently is removed: its name is free again when nothing of it runs.
3. A child that has used up its restarts crashes the supervisor, or is dropped and logged
   (`OnExhausted`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, TypeAlias, assert_never

import trio

from actors.runtime.child import (
    Child,
    ChildState,
    State,
    ask_to_stop,
    exhausted,
    run_once,
    stop_together,
    unwrapping_group,
    wait_ended,
)
from actors.runtime.restart import DoNotRestart, GiveUp, Restart

log = logging.getLogger(__name__)

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
        self._slots: dict[str, ChildState] = {}
        self._failed: dict[str, ChildState] = {}  # For inspection only; bounded.
        self._given_up: ChildState | None = None
        self._gave_up = trio.Event()

    def slots(self) -> Sequence[ChildState]:
        return (*self._failed.values(), *self._slots.values())

    def names(self) -> tuple[str, ...]:
        """Returns the children that have not ended, including those that back off or stop."""
        return tuple(sorted(self._slots))

    async def start_child(self, child: Child) -> None:
        """Starts a child and returns once it is ready.

        Raises `NameTaken`, `NotSupervising` or `NeverReady`. If the caller is cancelled meanwhile,
        the child continues: it belongs to the supervisor.
        """
        if self._nursery is None:
            raise NotSupervising(f"{self.name} cannot start {child.name}: it is {self.state.value}")
        if child.name in self._slots:
            raise NameTaken(f"{self.name} has a child {child.name} already")
        assert child.stop_grace_s <= self.stop_grace_s, f"{child.name} wants too long a grace"
        slot = ChildState(child)
        slot.begin(trio.current_time())
        self._failed.pop(child.name, None)
        # Before the first await, so that a concurrent start of the same name raises NameTaken.
        self._slots[child.name] = slot
        self._nursery.start_soon(self._keep, slot, name=f"{self.name}/{child.name}")
        await slot.settled.wait()
        if slot.ready_at is None:
            raise NeverReady(f"{child.name} ended before it was ready") from slot.last_error

    async def stop_child(self, name: str) -> bool:
        """Stops a child. Returns True once nothing of it runs, including its shielded clean-up.

        Returns False if its grace has passed: it is then overdue, logged, and listed until it ends.
        Safe to repeat; an unknown name counts as stopped.
        """
        slot = self._slots.get(name)
        if slot is None:
            await trio.lowlevel.checkpoint()
            return True
        ask_to_stop(slot)
        return await wait_ended(slot, until=trio.current_time() + slot.child.stop_grace_s)

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
                    await self._gave_up.wait()
                finally:
                    await self._stop()
        if self._given_up is not None:
            self.state = State.FAILED
            raise exhausted(self.name, self._given_up)

    def _open(self) -> None:
        assert self._nursery is None, f"{self.name} is running already"
        assert not self._slots
        self.state = State.RUNNING
        self.started_at = trio.current_time()
        self._failed.clear()
        self._given_up = None
        self._gave_up = trio.Event()

    async def _stop(self) -> None:
        self.state = State.STOPPING
        # From now on `start_child` raises NotSupervising, so no child can start behind the stop.
        self._nursery = None
        with trio.CancelScope(shield=True):
            await stop_together(reversed(tuple(self._slots.values())))
        self.state = State.STOPPED

    async def _keep(self, slot: ChildState) -> None:
        try:
            await self._run_until_over(slot)
        finally:
            # Removed before `end` is announced, so that a waiting task may reuse the name.
            del self._slots[slot.child.name]
            slot.end()

    async def _run_until_over(self, slot: ChildState) -> None:
        while True:
            await run_once(slot)
            if slot.is_stopping or not await self._is_due_again(slot):
                return
            slot.begin(trio.current_time())

    async def _is_due_again(self, slot: ChildState) -> bool:
        """Decides about a child that ended by itself, and waits for its back-off if it restarts."""
        now = trio.current_time()
        match slot.judge(now):
            case DoNotRestart():
                slot.state = State.FINISHED
            case GiveUp():
                self._give_up(slot)
            case Restart(after_s):
                slot.schedule_restart(now, after_s)
                # As the child's scope, so that `stop_child` also interrupts the back-off.
                with trio.CancelScope(shield=True) as slot.scope:
                    await trio.sleep(after_s)
                return not slot.is_stopping
            case verdict:
                assert_never(verdict)
        return False

    def _give_up(self, slot: ChildState) -> None:
        slot.state = State.FAILED
        name = slot.child.name
        log.critical("%s gave up on child %s", self.name, name, extra={"child": name})
        self._remember_failed(slot)
        match self._exhaustion:
            case OnExhausted.DROP:
                self._on_give_up(name, slot.crash)
            case OnExhausted.ESCALATE:
                self._given_up = slot
                self._gave_up.set()
            case _:
                assert_never(self._exhaustion)

    def _remember_failed(self, slot: ChildState) -> None:
        self._failed[slot.child.name] = slot
        while len(self._failed) > FAILED_KEPT_MAX:
            del self._failed[next(iter(self._failed))]
