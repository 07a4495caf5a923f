"""A child: its specification as a value, and the live record its supervisor keeps of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import trio

from actors.runtime.mailbox import Mailbox
from actors.runtime.restart import (
    USUAL_INTENSITY,
    Intensity,
    Outcome,
    Policy,
    Verdict,
    decide_restart,
    recent,
)

NESTED_MARGIN_S = 1.0


class State(Enum):
    """Where a child stands."""

    WAITING = "waiting"  # For its turn to start.
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    OVERDUE = "overdue"  # Asked to stop, and still there after its grace.
    STOPPED = "stopped"
    FINISHED = "finished"  # Ended of its own accord and let go.
    FAILED = "failed"  # Given up.


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What to run and how to look after it.

    `run` is called as `run()`, or as `run(inbox)` when there is a mailbox; a child that
    `reports_ready` is also passed `task_status` and counts as started once it has called
    `task_status.started()`. Any other child counts as started at its first checkpoint.
    """

    name: str = field(kw_only=False)
    run: Callable[..., Awaitable[object]]
    restart: Policy = Policy.PERMANENT
    intensity: Intensity = USUAL_INTENSITY
    stop_grace_s: float = 5.0
    mailbox: Mailbox[Any] | None = None
    reports_ready: bool = False
    supervisor: SupervisorInfo | None = None  # For inspection only; see `nest`.

    def __post_init__(self) -> None:
        assert self.name, "a child is told apart by its name"
        assert 0 <= self.stop_grace_s < math.inf, "a grace that never ends is not a grace"


@dataclass(slots=True, eq=False)
class ChildState:
    """The live record of one child across its incarnations; only its supervisor writes to it."""

    child: Child
    on_change: Callable[[], None] = lambda: None
    state: State = State.WAITING
    start_at: float = -math.inf
    started_at: float | None = None
    ready_at: float | None = None
    restarts_at: tuple[float, ...] = ()
    incarnation_count: int = 0
    crash: Exception | None = None
    last_error: Exception | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    settled: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.ended.set()

    @property
    def restart_count(self) -> int:
        """How often it was started again, be it for a sibling's sake."""
        return max(0, self.incarnation_count - 1)

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def is_stopping(self) -> bool:
        return self.state in (State.STOPPING, State.OVERDUE)

    @property
    def is_startable(self) -> bool:
        return self.state in (State.WAITING, State.BACKING_OFF)

    @property
    def is_over(self) -> bool:
        """Down, and never to be started again by this supervisor."""
        return self.state in (State.FINISHED, State.STOPPED, State.FAILED)

    @property
    def has_ended_by_itself(self) -> bool:
        return not self.is_alive and self.state in (State.STARTING, State.RUNNING)

    def begin(self, now: float) -> None:
        """Open the books of a new incarnation, which the caller is about to run."""
        self.ended = trio.Event()
        self.state = State.STARTING
        self.started_at = now
        self.incarnation_count += 1
        self.crash = None
        # Shielded, so that a cancelled nursery leaves the order of stopping to the supervisor.
        self.scope = trio.CancelScope(shield=True)

    def become_ready(self) -> None:
        # A child asked to stop may still report ready; it stays on its way out.
        if self.state is State.STARTING:
            self.state = State.RUNNING
            self.ready_at = trio.current_time()
            self.settled.set()
            self.on_change()

    def end(self) -> None:
        """Close the books: nothing of this child runs any more."""
        if self.is_stopping:
            self.state = State.STOPPED
        self.settled.set()
        self.ended.set()
        self.on_change()

    def fail(self, error: Exception) -> None:
        self.crash = self.last_error = error

    def judge(self, now: float) -> Verdict:
        return decide_restart(
            self.child.restart,
            Outcome.RETURNED if self.crash is None else Outcome.CRASHED,
            intensity=self.child.intensity,
            restarts_at=self.restarts_at,
            now=now,
        )

    def schedule_restart(self, now: float, after_s: float) -> None:
        """Note a restart, which counts towards the intensity, and put it off."""
        within_s = self.child.intensity.within_s
        self.restarts_at = (*recent(self.restarts_at, within_s=within_s, now=now), now)
        self.state = State.BACKING_OFF
        self.start_at = now + after_s


class SupervisorInfo(Protocol):
    """What nesting and inspection need to know of a supervisor."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def started_at(self) -> float | None: ...
    @property
    def stop_grace_s(self) -> float:
        """The longest that an orderly stop of its children may take."""
        ...

    def slots(self) -> Sequence[ChildState]: ...
    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None: ...


def nest(
    supervisor: SupervisorInfo,
    *,
    restart: Policy = Policy.PERMANENT,
    intensity: Intensity = USUAL_INTENSITY,
) -> Child:
    """A supervisor as a child: ready when its children are, with grace enough for all of them."""
    return Child(
        supervisor.name,
        run=supervisor.run,
        restart=restart,
        intensity=intensity,
        stop_grace_s=supervisor.stop_grace_s + NESTED_MARGIN_S,
        reports_ready=True,
        supervisor=supervisor,
    )


# The life of an incarnation: running it under its shield, and stopping it within its grace.
#
# Holds the runtime's only `except Exception`: here a crash becomes a fact for its supervisor.
#
# What a grace can do: Trio offers no way to abandon a task or to break a shield from outside. A
# child that outstays its grace is marked overdue and logged, the stop moves on to the others, and
# at the very end the supervisor waits for it, saying so every `REMINDER_S`. The stop is thus
# bounded by the graces plus whatever overdue children still take; past that, only the process
# manager's kill helps.


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

    slot: ChildState

    def started(self, value: object = None) -> None:
        del value  # Servers report their addresses; nobody here asks for them.
        self.slot.become_ready()


async def run_once(slot: ChildState) -> None:
    """Run one incarnation to its end; a crash is logged here, once, and kept in the slot."""
    try:
        # Within the try: the scope first strips its own Cancelled from an exception group,
        # so that a crash during a stop is seen as the plain crash it is.
        with slot.scope:
            await _call(slot)
    except Exception as error:  # noqa: BLE001  # This is the place where crashes end.
        slot.fail(unwrap_single(error))
        _log_crash(slot)


async def _call(slot: ChildState) -> None:
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


def unwrap_single(error: Exception) -> Exception:
    """The one real error inside single-membered groups; a group of several stays a group."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _log_crash(slot: ChildState) -> None:
    # An exhausted supervisor has logged the traceback already, where the crash happened.
    trace = None if isinstance(slot.crash, RestartsExhausted) else slot.crash
    name = slot.child.name
    log.error("child %s crashed: %r", name, slot.crash, exc_info=trace, extra={"child": name})


def exhausted(supervisor: str, slot: ChildState) -> RestartsExhausted:
    """The error to escalate with, chained to the crash that was one too many."""
    error = RestartsExhausted(supervisor, slot.child.name)
    error.__cause__ = slot.crash
    return error


@contextmanager
def unwrapping_group() -> Iterator[None]:
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


def ask_to_stop(slot: ChildState) -> None:
    if not slot.is_alive:
        slot.state = slot.state if slot.is_over else State.STOPPED
    elif not slot.is_stopping:
        slot.state = State.STOPPING
        slot.scope.cancel(reason=f"child {slot.child.name} is stopped by its supervisor")


async def wait_ended(slot: ChildState, *, until: float) -> bool:
    """Wait for a child asked to stop; past the instant `until` it is marked overdue."""
    with trio.move_on_at(until):
        await slot.ended.wait()
    if slot.is_alive and slot.state is not State.OVERDUE:
        slot.state = State.OVERDUE
        _log_overdue(slot)
    return not slot.is_alive


def _log_overdue(slot: ChildState) -> None:
    name, grace_s = slot.child.name, slot.child.stop_grace_s
    log.warning("child %s is overdue: grace was %s s", name, grace_s, extra={"child": name})


async def stop_in_turn(slots: Iterable[ChildState]) -> None:
    """Stop one child after another, each within its own grace, then wait for the overdue."""
    asked = list(slots)
    for slot in asked:
        ask_to_stop(slot)
        if slot.state is State.STOPPING:  # One overdue already has had its grace.
            await wait_ended(slot, until=trio.current_time() + slot.child.stop_grace_s)
    await _wait_overdue(asked)


async def stop_together(slots: Iterable[ChildState]) -> None:
    """Stop children that do not depend on each other: all are asked at once, in turn."""
    asked = list(slots)
    for slot in asked:
        ask_to_stop(slot)
    now = trio.current_time()
    for slot in sorted(asked, key=lambda slot: slot.child.stop_grace_s):
        if slot.is_alive:
            await wait_ended(slot, until=now + slot.child.stop_grace_s)
    await _wait_overdue(asked)


async def _wait_overdue(slots: Iterable[ChildState]) -> None:
    for slot in slots:
        while slot.is_alive:
            with trio.move_on_after(REMINDER_S):
                await slot.ended.wait()
                break
            _log_overdue(slot)


# Bounded clean-up: awaiting in a `finally` without being cancelled and without hanging.


@contextmanager
def bounded_cleanup(grace_s: float, *, what: str = "clean-up") -> Iterator[trio.CancelScope]:
    """Shield the body from cancellation for at most `grace_s`; an overrun is cut off and logged.

    Keep `grace_s` below the child's `stop_grace_s`, or the supervisor calls the child overdue.
    """
    with trio.move_on_after(grace_s, shield=True) as scope:
        yield scope
    if scope.cancelled_caught:
        log.warning("%s cut off after %s s", what, grace_s, extra={"cleanup": what})
