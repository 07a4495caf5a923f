"""Child: its specification, the decision whether it restarts, its live record, and its life.

The decision consists of pure functions: time is an argument. The record survives restarts. Only the
supervisor changes it; other code may read it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, assert_never

import trio

from actors.runtime.mailbox import Mailbox

log = logging.getLogger(__name__)

# A nested supervisor needs the graces of all its children, and this much for itself.
NESTED_MARGIN_S = 1.0


# The restart decision: whether, when and with which siblings a child that ended is started again.


class Policy(Enum):
    """Which ends of a child cause a restart."""

    # Every end, also a plain return.
    PERMANENT = "permanent"
    # A crash only.
    TRANSIENT = "transient"
    # No end.
    TEMPORARY = "temporary"


class Strategy(Enum):
    """Which siblings restart together with a child."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Outcome(Enum):
    """How an incarnation ended by itself."""

    RETURNED = "returned"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """How often one child may be restarted, and how long each restart is delayed.

    More than `restarts_max` restarts within `within_s` give the child up. With a larger number, a
    permanent failure is hidden for longer; with a smaller one, a short outage ends the supervisor.
    """

    restarts_max: int = 5
    within_s: float = 60.0
    backoff_s: float = 0.1
    backoff_s_max: float = 10.0

    def __post_init__(self) -> None:
        assert self.restarts_max >= 0
        assert 0 <= self.backoff_s <= self.backoff_s_max
        # Otherwise the back-off alone would exceed the window, and a child that always crashes
        # would never be given up.
        assert sum(self.backoff_at(n) for n in range(self.restarts_max)) < self.within_s

    def backoff_at(self, restart_count: int) -> float:
        """Returns the delay before the next restart, after `restart_count` restarts within the
        window."""
        return min(self.backoff_s_max, self.backoff_s * 2.0**restart_count)


USUAL_INTENSITY: Final = Intensity()


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class DoNotRestart:
    pass


@dataclass(frozen=True, slots=True)
class GiveUp:
    pass


Verdict: TypeAlias = Restart | DoNotRestart | GiveUp


def decide_restart(
    policy: Policy,
    outcome: Outcome,
    *,
    intensity: Intensity,
    restarts_at: Sequence[float],
    now: float,
) -> Verdict:
    """Decides about a child that ended, by the times of its earlier restarts."""
    if not is_restarted(policy, outcome):
        return DoNotRestart()
    restart_count = len(restarts_within(restarts_at, within_s=intensity.within_s, now=now))
    if restart_count >= intensity.restarts_max:
        return GiveUp()
    return Restart(after_s=intensity.backoff_at(restart_count))


def is_restarted(policy: Policy, outcome: Outcome) -> bool:
    match policy:
        case Policy.PERMANENT:
            return True
        case Policy.TRANSIENT:
            return outcome is Outcome.CRASHED
        case Policy.TEMPORARY:
            return False
        case _:
            assert_never(policy)


def restarts_within(
    restarts_at: Sequence[float], *, within_s: float, now: float
) -> tuple[float, ...]:
    """Returns the times that still count towards the intensity."""
    return tuple(at for at in restarts_at if now - at < within_s)


def siblings_of(strategy: Strategy, index: int, count: int) -> tuple[int, ...]:
    """Returns the positions, in start order, of the children that restart together with child
    `index`."""
    match strategy:
        case Strategy.ONE_FOR_ONE:
            return ()
        case Strategy.ONE_FOR_ALL:
            return tuple(other for other in range(count) if other != index)
        case Strategy.REST_FOR_ONE:
            return tuple(range(index + 1, count))
        case _:
            assert_never(strategy)


# The specification and the live record.


class State(Enum):
    """The states of a child."""

    # Waits until the children before it are ready.
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    # Was asked to stop and still runs after its grace.
    OVERDUE = "overdue"
    STOPPED = "stopped"
    # Ended by itself, and its policy requires no restart.
    FINISHED = "finished"
    # Used up its restarts.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What to run, and how to supervise it.

    `run` is called as `run()`, or as `run(inbox)` if there is a mailbox. A child that
    `reports_ready` also gets `task_status` and counts as started once it has called
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
        assert self.name, "a child needs a name"
        assert 0 <= self.stop_grace_s < math.inf, "a grace that never ends is not a grace"


@dataclass(slots=True, eq=False)
class ChildState:
    """The live record of one child across its incarnations; only its supervisor changes it."""

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
        # Nothing runs before the first `begin`.
        self.ended.set()

    @property
    def restart_count(self) -> int:
        """How often the child was started again, for a sibling's crash too."""
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
        """Returns whether the child has ended and this supervisor will not start it again."""
        return self.state in (State.FINISHED, State.STOPPED, State.FAILED)

    @property
    def has_ended_by_itself(self) -> bool:
        return not self.is_alive and self.state in (State.STARTING, State.RUNNING)

    def begin(self, now: float) -> None:
        """Prepares the record for a new incarnation, which the caller then runs."""
        self.ended = trio.Event()
        self.state = State.STARTING
        self.started_at = now
        self.incarnation_count += 1
        self.crash = None
        # Shielded from the cancellation of the nursery, so that the supervisor decides the order in
        # which children stop.
        self.scope = trio.CancelScope(shield=True)

    def become_ready(self) -> None:
        # A child that was asked to stop may still report ready; it must stay in its stopping state.
        if self.state is State.STARTING:
            self.state = State.RUNNING
            self.ready_at = trio.current_time()
            self.settled.set()
            self.on_change()

    def end(self) -> None:
        """Closes the record of an incarnation: nothing of this child runs any more."""
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
        """Records a restart, which counts towards the intensity, and sets its time."""
        within_s = self.child.intensity.within_s
        self.restarts_at = (*restarts_within(self.restarts_at, within_s=within_s, now=now), now)
        self.state = State.BACKING_OFF
        self.start_at = now + after_s


class SupervisorInfo(Protocol):
    """What nesting and inspection need to know about a supervisor."""

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
        """The longest time that an orderly stop of its children may take."""
        ...

    def records(self) -> Sequence[ChildState]: ...
    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None: ...


def nest(
    supervisor: SupervisorInfo,
    *,
    restart: Policy = Policy.PERMANENT,
    intensity: Intensity = USUAL_INTENSITY,
) -> Child:
    """Returns a supervisor as a child: ready when its children are, with enough grace for all of
    them."""
    return Child(
        supervisor.name,
        run=supervisor.run,
        restart=restart,
        intensity=intensity,
        stop_grace_s=supervisor.stop_grace_s + NESTED_MARGIN_S,
        reports_ready=True,
        supervisor=supervisor,
    )


# The life of an incarnation: it runs in a shielded scope, and is stopped within its grace.
#
# This file has the runtime's only `except Exception`: here a crash becomes a value for the
# supervisor.
#
# Trio offers no way to abandon a task or to break a shield from outside. Therefore a child that
# exceeds its grace is marked overdue and logged, and the stop continues with the others. At the end
# the supervisor waits for it and logs that every `REMINDER_S`. So a stop takes at most the sum of
# the graces plus the time of overdue children; beyond that, only the process manager can kill the
# process.

# Interval of the log line about an overdue child. A shorter one floods the log during a hang.
REMINDER_S = 30.0


class RestartsExhausted(Exception):
    """A child needed more restarts than its intensity allows. The cause is its last crash."""

    def __init__(self, supervisor: str, child: str) -> None:
        super().__init__(f"{supervisor} gave up on {child}: its restarts are used up")
        self.supervisor = supervisor
        self.child = child


@dataclass(frozen=True, slots=True)
class _Readiness:
    """Implements Trio's `task_status` protocol for a child."""

    record: ChildState

    def started(self, value: object = None) -> None:
        del value  # Servers report their addresses, which are not used here.
        self.record.become_ready()


async def run_once(record: ChildState) -> None:
    """Runs one incarnation to its end. A crash is logged here, once, and kept in the record."""
    try:
        # Inside the `try`: the scope first removes its own Cancelled from an exception group, so
        # that a crash during a stop is raised as the plain crash.
        with record.scope:
            await _call(record)
    except Exception as error:  # noqa: BLE001  # This is the place where crashes end.
        record.fail(unwrap_single(error))
        _log_crash(record)


async def _call(record: ChildState) -> None:
    child = record.child
    if record.is_stopping:  # Stopped before its first step.
        return
    options: dict[str, object] = {"task_status": _Readiness(record)} if child.reports_ready else {}
    if not child.reports_ready:
        # The supervisor cannot run before the child's first checkpoint, so this is not too early.
        record.become_ready()
    if child.mailbox is None:
        await child.run(**options)
        return
    with child.mailbox.open_inbox() as inbox:
        await child.run(inbox, **options)


def unwrap_single(error: Exception) -> Exception:
    """Returns the error inside groups with a single member; a group of several stays a group."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _log_crash(record: ChildState) -> None:
    # An exhausted supervisor has already logged the traceback where the crash happened.
    trace = None if isinstance(record.crash, RestartsExhausted) else record.crash
    name = record.child.name
    log.error("child %s crashed: %r", name, record.crash, exc_info=trace, extra={"child": name})


def exhaustion_error(supervisor: str, record: ChildState) -> RestartsExhausted:
    """Returns the error with which a supervisor escalates, chained to the last crash."""
    error = RestartsExhausted(supervisor, record.child.name)
    error.__cause__ = record.crash
    return error


@contextmanager
def unwrapping_group() -> Iterator[None]:
    """Raises the single error of a nursery without its group: a single KeyboardInterrupt stays
    one."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from error.__cause__


def ask_to_stop(record: ChildState) -> None:
    if not record.is_alive:
        record.state = record.state if record.is_over else State.STOPPED
    elif not record.is_stopping:
        record.state = State.STOPPING
        record.scope.cancel(reason=f"child {record.child.name} is stopped by its supervisor")


async def wait_ended(record: ChildState, *, until: float) -> bool:
    """Waits for a child that was asked to stop. After the instant `until` it is marked overdue."""
    with trio.move_on_at(until):
        await record.ended.wait()
    if record.is_alive and record.state is not State.OVERDUE:
        record.state = State.OVERDUE
        _log_overdue(record)
    return not record.is_alive


def _log_overdue(record: ChildState) -> None:
    name, grace_s = record.child.name, record.child.stop_grace_s
    log.warning("child %s is overdue: grace was %s s", name, grace_s, extra={"child": name})


async def stop_in_turn(records: Iterable[ChildState]) -> None:
    """Stops one child after the other, each within its own grace, then waits for overdue ones."""
    stopping = list(records)
    for record in stopping:
        ask_to_stop(record)
        # A child that is already overdue has had its grace.
        if record.state is State.STOPPING:
            await wait_ended(record, until=trio.current_time() + record.child.stop_grace_s)
    await _wait_overdue(stopping)


async def stop_together(records: Iterable[ChildState]) -> None:
    """Stops children that do not depend on each other: asks all at once, in order."""
    stopping = list(records)
    for record in stopping:
        ask_to_stop(record)
    now = trio.current_time()
    # All graces began at `now`. In the order of their ends, each overdue child is reported on time.
    for record in sorted(stopping, key=lambda record: record.child.stop_grace_s):
        if record.is_alive:
            await wait_ended(record, until=now + record.child.stop_grace_s)
    await _wait_overdue(stopping)


async def _wait_overdue(records: Iterable[ChildState]) -> None:
    for record in records:
        while record.is_alive:
            with trio.move_on_after(REMINDER_S):
                await record.ended.wait()
                break
            _log_overdue(record)


# Bounded clean-up: awaiting in a `finally` without being cancelled and without hanging.


@contextmanager
def bounded_cleanup(grace_s: float, *, what: str = "clean-up") -> Iterator[trio.CancelScope]:
    """Shields the body from cancellation for at most `grace_s`. A longer clean-up is interrupted
    and logged.

    Keep `grace_s` below the child's `stop_grace_s`, or the supervisor marks the child as overdue.
    """
    with trio.move_on_after(grace_s, shield=True) as scope:
        yield scope
    if scope.cancelled_caught:
        log.warning("%s cut off after %s s", what, grace_s, extra={"cleanup": what})
