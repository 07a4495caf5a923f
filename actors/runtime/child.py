"""A child: its specification as a value, and the live record its supervisor keeps of it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
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
    judge,
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
    supervisor: Supervises | None = None  # For inspection only; see `nest`.

    def __post_init__(self) -> None:
        assert self.name, "a child is told apart by its name"
        assert 0 <= self.stop_grace_s < math.inf, "a grace that never ends is not a grace"


@dataclass(slots=True, eq=False)
class Slot:
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
        return judge(
            self.child.restart,
            Outcome.RETURNED if self.crash is None else Outcome.CRASHED,
            intensity=self.child.intensity,
            restarts_at=self.restarts_at,
            now=now,
        )

    def put_off(self, now: float, after_s: float) -> None:
        """Note a restart, which counts towards the intensity, and put it off."""
        within_s = self.child.intensity.within_s
        self.restarts_at = (*recent(self.restarts_at, within_s=within_s, now=now), now)
        self.state = State.BACKING_OFF
        self.start_at = now + after_s


class Supervises(Protocol):
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

    def slots(self) -> Sequence[Slot]: ...
    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None: ...


def nest(
    supervisor: Supervises,
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
