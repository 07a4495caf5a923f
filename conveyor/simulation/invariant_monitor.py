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
from conveyor.simulation.backends.snapshot import RowChange, Snapshot, compare, idle_runs
from conveyor.simulation.backends.storage_dump import StoredItem
from conveyor.simulation.client_history import Call, Delivery, Fetch, History
from conveyor.simulation.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class StateChange:
    """What a checker receives: the engine before and after, the changed rows, and the history so
    far.

    `body` returns a stored body, None if there is none; `bodies` returns the names of all bodies.
    `stored_items` returns what the engine stores beside its rows. `rows_come_first` is True for
    engines that write the rows of an ingest step before they count them.
    """

    before: Snapshot
    after: Snapshot
    changes: Sequence[RowChange]
    history: History
    body: Callable[[str], bytes | None]
    bodies: Callable[[], Sequence[str]]
    rows_come_first: bool = False
    stored_items: Callable[[], Iterable[StoredItem]] = tuple

    def changed(self, kind: type) -> list[RowChange]:
        return [change for change in self.changes if change.kind is kind]

    def has_half_written_change(self, job_id: str) -> bool:
        """Whether a change of this job was only half written before: its second part is still
        missing. No client was told of that change yet, so what it forbids may still happen."""
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
    when_calm: Sequence[OnWrite] = ()
    at_the_end: Sequence[OnWrite] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation: the checker that found it, its sentence, and the virtual time."""

    checker: str
    sentence: str
    at: float


@dataclass(slots=True, kw_only=True)
class InvariantMonitor:
    """Calls the checkers, and counts the calls and writes of the program. `take_snapshot` returns a
    snapshot of what the engine has committed."""

    take_snapshot: Callable[[], Snapshot]
    body: Callable[[str], bytes | None]
    bodies: Callable[[], Sequence[str]]
    checkers: Checkers
    history: History
    trace: Trace
    check_every: int
    calls_max: int
    on_violation: Callable[[], None]
    on_too_many_calls: Callable[[], None]
    rows_come_first: bool = False
    stored_items: Callable[[], Iterable[StoredItem]] = tuple
    queue_depths: Callable[[], Mapping[str, int]] = dict
    violations: list[Violation] = field(default_factory=list)
    writes_count: int = 0
    calls_count: int = 0
    last: Snapshot = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.take_snapshot()

    def on_call(self) -> None:
        """Counts one call to an engine. A world with too many calls is stopped: it makes no
        progress."""
        self.calls_count += 1
        if self.calls_count == self.calls_max:
            self.on_too_many_calls()

    def on_write(self) -> None:
        """Counts one write that may have changed rows; after every `check_every` of them a snapshot
        is compared."""
        self.writes_count += 1
        if self.writes_count % self.check_every == 0:
            self.check_snapshot()

    def check_snapshot(self) -> StateChange:
        """Takes a snapshot, compares it with the last one, and runs the checkers of writes if
        anything changed."""
        before, after = self.last, self.take_snapshot()
        self.last = after
        written = compare(before, after)
        after.update_groups(before, written)
        changes = [change for change in written if change.old != change.new]
        state = self._state_change(before, after, changes)
        if changes or before.leases != after.leases:
            self._run_checkers(self.checkers.on_write, state)
        return state

    def on_ack(self, acked: Acked) -> None:
        self._check_event(self.checkers.on_ack, acked)

    def on_answer(self, call: Call) -> None:
        self._check_event(self.checkers.on_answer, call)

    def on_fetch(self, fetch: Fetch) -> None:
        self._check_event(self.checkers.on_fetch, fetch)

    def on_delivery(self, delivery: Delivery) -> None:
        self._check_event(self.checkers.on_delivery, delivery)

    def check_calm(self) -> StateChange:
        """Checks liveness. The simulator calls it every few seconds once faults are over."""
        state = self.check_snapshot()
        if self.history.calm_since is None:
            self.history.calm_since = state.after.now
        self.history.note_idle(idle_runs(state.after, self.queue_depths()), state.after.at)
        self._run_checkers(self.checkers.when_calm, state)
        return state

    def check_end(self) -> None:
        self._run_checkers(self.checkers.at_the_end, self.check_snapshot())

    def _check_event(self, checkers: Sequence[OnEvent], event: Any) -> None:
        if checkers:
            state = self.check_snapshot()
            for checker in checkers:
                self._report(checker.__name__, checker(state, event))

    def _run_checkers(self, checkers: Sequence[OnWrite], state: StateChange) -> None:
        for checker in checkers:
            self._report(checker.__name__, checker(state))

    def _state_change(
        self, before: Snapshot, after: Snapshot, changes: Sequence[RowChange]
    ) -> StateChange:
        return StateChange(
            before,
            after,
            changes,
            self.history,
            self.body,
            self.bodies,
            self.rows_come_first,
            self.stored_items,
        )

    def _report(self, checker: str, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            self.violations.append(Violation(checker, sentence, trio.current_time()))
            self.trace.note("checker", checker, sentence)
            self.on_violation()
