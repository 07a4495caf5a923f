"""The life of an incarnation: running it under its shield, and stopping it within its grace.

Holds the runtime's only `except Exception`: here a crash becomes a fact for its supervisor.

What a grace can do: Trio offers no way to abandon a task or to break a shield from outside. A
child that outstays its grace is marked overdue and logged, the stop moves on to the others, and
at the very end the supervisor waits for it, saying so every `REMINDER_S`. The stop is thus
bounded by the graces plus whatever overdue children still take; past that, only the process
manager's kill helps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from actors.runtime.child import Slot, State

log = logging.getLogger(__name__)

REMINDER_S = 30.0


class RestartsExhausted(Exception):
    """A child needed more restarts than its intensity allows; the cause is its last crash."""

    def __init__(self, supervisor: str, child: str) -> None:
        super().__init__(f"{supervisor} gave up on {child}: its restarts are used up")
        self.supervisor = supervisor
        self.child = child


@dataclass(frozen=True, slots=True)
class _Readiness:
    """Trio's `task_status` convention, told to a slot."""

    slot: Slot

    def started(self, value: object = None) -> None:
        del value  # Servers report their addresses; nobody here asks for them.
        self.slot.become_ready()


async def incarnate(slot: Slot) -> None:
    """Run one incarnation to its end; a crash is logged here, once, and kept in the slot."""
    try:
        # Within the try: the scope first strips its own Cancelled from an exception group,
        # so that a crash during a stop is seen as the plain crash it is.
        with slot.scope:
            await _call(slot)
    except Exception as error:  # noqa: BLE001  # This is the place where crashes end.
        slot.fail(innermost(error))
        _log_crash(slot)


async def _call(slot: Slot) -> None:
    child = slot.child
    if slot.is_stopping:  # Stopped before its first step: there is nothing to undo.
        return
    options: dict[str, object] = {"task_status": _Readiness(slot)} if child.reports_ready else {}
    if not child.reports_ready:
        # Its supervisor cannot run before the child's first checkpoint, so this is not early.
        slot.become_ready()
    if child.mailbox is None:
        await child.run(**options)
        return
    with child.mailbox.open_inbox() as inbox:
        await child.run(inbox, **options)


def innermost(error: Exception) -> Exception:
    """The one real error inside single-membered groups; a group of several stays a group."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _log_crash(slot: Slot) -> None:
    # An exhausted supervisor has logged the traceback already, where the crash happened.
    trace = None if isinstance(slot.crash, RestartsExhausted) else slot.crash
    name = slot.child.name
    log.error("child %s crashed: %r", name, slot.crash, exc_info=trace, extra={"child": name})


def exhausted(supervisor: str, slot: Slot) -> RestartsExhausted:
    """The error to escalate with, chained to the crash that was one too many."""
    error = RestartsExhausted(supervisor, slot.child.name)
    error.__cause__ = slot.crash
    return error


@contextmanager
def ungrouped() -> Iterator[None]:
    """Let what left a nursery alone leave it bare: a lone KeyboardInterrupt stays one."""
    try:
        yield
    except BaseExceptionGroup as group:
        lone: BaseException = group
        while isinstance(lone, BaseExceptionGroup) and len(lone.exceptions) == 1:
            lone = lone.exceptions[0]
        if lone is group:
            raise
        raise lone from lone.__cause__


def ask_to_stop(slot: Slot) -> None:
    if not slot.is_alive:
        slot.state = slot.state if slot.is_over else State.STOPPED
    elif not slot.is_stopping:
        slot.state = State.STOPPING
        slot.scope.cancel(reason=f"child {slot.child.name} is stopped by its supervisor")


async def wait_ended(slot: Slot, *, until: float) -> bool:
    """Wait for a child asked to stop; past the instant `until` it is marked overdue."""
    with trio.move_on_at(until):
        await slot.ended.wait()
    if slot.is_alive and slot.state is not State.OVERDUE:
        slot.state = State.OVERDUE
        _log_overdue(slot)
    return not slot.is_alive


def _log_overdue(slot: Slot) -> None:
    name, grace_s = slot.child.name, slot.child.stop_grace_s
    log.warning("child %s is overdue: grace was %s s", name, grace_s, extra={"child": name})


async def stop_in_turn(slots: Iterable[Slot]) -> None:
    """Stop one child after another, each within its own grace, then wait for the overdue."""
    asked = list(slots)
    for slot in asked:
        ask_to_stop(slot)
        if slot.state is State.STOPPING:  # One overdue already has had its grace.
            await wait_ended(slot, until=trio.current_time() + slot.child.stop_grace_s)
    await _wait_overdue(asked)


async def stop_together(slots: Iterable[Slot]) -> None:
    """Stop children that do not depend on each other: all are asked at once, in turn."""
    asked = list(slots)
    for slot in asked:
        ask_to_stop(slot)
    now = trio.current_time()
    for slot in sorted(asked, key=lambda slot: slot.child.stop_grace_s):
        if slot.is_alive:
            await wait_ended(slot, until=now + slot.child.stop_grace_s)
    await _wait_overdue(asked)


async def _wait_overdue(slots: Iterable[Slot]) -> None:
    for slot in slots:
        while slot.is_alive:
            with trio.move_on_after(REMINDER_S):
                await slot.ended.wait()
                break
            _log_overdue(slot)
