"""The invariant monitor: compares snapshots of the engine and calls the checkers (SPEC.md 6).

A snapshot reads the engine directly, between two steps of the program. It takes no virtual time,
draws no random number and is invisible to the program, so checking does not change what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from conveyor.domain.changes import CrossingKey
from conveyor.domain.model import JobStatus, Run, RunStatus
from conveyor.simulation.backends.snapshot import Changed, Snapshot, compare, idle_runs
from conveyor.simulation.backends.storage_dump import StoredItem
from conveyor.simulation.client_history import Call, Delivery, Fetch, History
from conveyor.simulation.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class StateChange:
    """What a checker receives: the engine before and after, the changed rows, and the history so
    far.

    `body` returns a stored body, None if there is none; `bodies` returns the names of all bodies.
    `remains` returns what the engine stores beside its rows. `rows_come_first` is True for engines
    that write the rows of an ingest step before they count them.
    """

    before: Snapshot
    after: Snapshot
    changes: Sequence[Changed]
    history: History
    body: Callable[[str], bytes | None]
    bodies: Callable[[], Sequence[str]]
    rows_come_first: bool = False
    remains: Callable[[], Iterable[StoredItem]] = tuple

    def changed(self, kind: type) -> list[Changed]:
        return [change for change in self.changes if change.kind is kind]

    def is_unfinished(self, job_id: str) -> bool:
        """Whether a change of this job was only half written before: its second part is still
        missing. Nobody was told of that change yet, so what it forbids may still happen."""
        return (job_id,) in self.before.rows[CrossingKey]

    def is_deleted(self, run: Run) -> bool:
        """Whether the run or its job is deleted. The rows of a deleted run are removed one by one,
        so they need not add up."""
        job = self.after.jobs.get((run.job_id,))
        is_gone = job is None or job.status is JobStatus.DELETED
        return is_gone or run.status is RunStatus.DELETED


@dataclass(frozen=True, slots=True)
class Acked:
    """The messages that a process is about to ack, each as (run id, task id)."""

    process: str
    refs: Sequence[tuple[str, str]]


OnWrite = Callable[[StateChange], Iterable[str]]
OnEvent = Callable[[StateChange, Any], Iterable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkers:
    """The checkers of each occasion. A checker yields one sentence per violation."""

    on_write: Sequence[OnWrite] = ()
    on_ack: Sequence[OnEvent] = ()
    on_answer: Sequence[OnEvent] = ()
    on_fetch: Sequence[OnEvent] = ()
    on_delivery: Sequence[OnEvent] = ()
    at_ease: Sequence[OnWrite] = ()
    at_the_end: Sequence[OnWrite] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation: the checker that found it, its sentence, and the virtual time."""

    checker: str
    what: str
    at: float


@dataclass(slots=True, kw_only=True)
class InvariantMonitor:
    """Calls the checkers, and counts the calls and writes of the program. `peek` returns a snapshot
    of what the engine has committed."""

    peek: Callable[[], Snapshot]
    body: Callable[[str], bytes | None]
    bodies: Callable[[], Sequence[str]]
    checkers: Checkers
    history: History
    trace: Trace
    check_every: int
    calls_max: int
    on_violation: Callable[[], None]
    on_flood: Callable[[], None]
    rows_come_first: bool = False
    remains: Callable[[], Iterable[StoredItem]] = tuple
    queued: Callable[[], Mapping[str, int]] = dict
    violations: list[Violation] = field(default_factory=list)
    writes_count: int = 0
    calls_count: int = 0
    last: Snapshot = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.peek()

    def called(self) -> None:
        """Counts one call to an engine. A world with too many calls is stopped: it makes no
        progress."""
        self.calls_count += 1
        if self.calls_count == self.calls_max:
            self.on_flood()

    def wrote(self) -> None:
        """Counts one write that may have changed rows; after every `check_every` of them a snapshot
        is compared."""
        self.writes_count += 1
        if self.writes_count % self.check_every == 0:
            self.check_snapshot()

    def check_snapshot(self) -> StateChange:
        before, after = self.last, self.peek()
        self.last = after
        written = compare(before, after)
        after.follow(before, written)
        changes = [change for change in written if change.old != change.new]
        moment = self._moment(before, after, changes)
        if changes or before.leases != after.leases:
            self._ask(self.checkers.on_write, moment)
        return moment

    def acks(self, acked: Acked) -> None:
        self._tell(self.checkers.on_ack, acked)

    def answered(self, call: Call) -> None:
        self._tell(self.checkers.on_answer, call)

    def fetches(self, fetch: Fetch) -> None:
        self._tell(self.checkers.on_fetch, fetch)

    def delivered(self, delivery: Delivery) -> None:
        self._tell(self.checkers.on_delivery, delivery)

    def ease(self) -> StateChange:
        """Checks liveness. The simulator calls it every few seconds once faults are over."""
        moment = self.check_snapshot()
        if self.history.at_ease_since is None:
            self.history.at_ease_since = moment.after.now
        self.history.note_idle(idle_runs(moment.after, self.queued()), moment.after.at)
        self._ask(self.checkers.at_ease, moment)
        return moment

    def end(self) -> None:
        self._ask(self.checkers.at_the_end, self.check_snapshot())

    def _tell(self, checkers: Sequence[OnEvent], event: Any) -> None:
        if checkers:
            moment = self.check_snapshot()
            for checker in checkers:
                self._report(checker.__name__, checker(moment, event))

    def _ask(self, checkers: Sequence[OnWrite], moment: StateChange) -> None:
        for checker in checkers:
            self._report(checker.__name__, checker(moment))

    def _moment(self, before: Snapshot, after: Snapshot, changes: Sequence[Changed]) -> StateChange:
        return StateChange(
            before,
            after,
            changes,
            self.history,
            self.body,
            self.bodies,
            self.rows_come_first,
            self.remains,
        )

    def _report(self, checker: str, wrongs: Iterable[str]) -> None:
        for what in wrongs:
            self.violations.append(Violation(checker, what, trio.current_time()))
            self.trace.note("checker", checker, what)
            self.on_violation()
