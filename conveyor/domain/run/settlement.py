"""How claims and outcomes change a task and the counters of its run (SPEC.md 4.4).

A claim is a number. Settling, retrying and releasing a task are guarded by it, so that a worker
that lost its claim cannot change the task. The change of a task's status and the count of its shard
are one transaction: after a crash, the counters always match the rows.

The first delivery of a message needs no write: the queue gave the message to one worker. That
worker holds the task under claim 0, and whatever it writes raises the number to 1. A redelivered
message raises the number before the fetch. So a worker whose message was given to another one can
no longer settle, and each task is counted once, however many workers fetched it (decision 0026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from conveyor.domain import errors, lifecycle, limits, timing
from conveyor.domain.changes import (
    Applied,
    Change,
    Guard,
    Missing,
    SettleChange,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
)
from conveyor.domain.damage import DamagedTask
from conveyor.domain.ids import Random
from conveyor.domain.lifecycle import RELEASES_PASS, SETTLES_PASS, TASK, TaskEvent
from conveyor.domain.model import (
    Attempt,
    FailureReason,
    Problem,
    Result,
    ShardCounters,
    Task,
    TaskRef,
    TaskStatus,
)
from conveyor.domain.timing import backoff_s, jitter_s


class Claimed(msgspec.Struct, frozen=True):
    """This worker holds the task until `task.claim_until`, under the number `task.claim`.

    Claim 0 is a first delivery: nothing was written, and the task is held as long as its message is
    hidden. If the queue delivers a message twice, two workers hold claim 0; `nonce` distinguishes
    their bodies and requests.
    """

    task: Task
    nonce: str = ""

    @property
    def claim_id(self) -> str:
        """Identifies this claim among all claims of the task."""
        return f"{self.task.claim}.{self.nonce}" if self.nonce else str(self.task.claim)


class AlreadyDone(msgspec.Struct, frozen=True):
    """The task is terminal. The worker checks whether the run is complete, then acks."""


class HeldByOther(msgspec.Struct, frozen=True):
    """Another worker holds the claim until `until`."""

    until: float


class NoSuchTask(msgspec.Struct, frozen=True):
    """The row is deleted or not visible yet, or the run has ended."""


class Throttled(msgspec.Struct, frozen=True):
    """The store throttled the claim and wrote nothing."""


class Unreadable(msgspec.Struct, frozen=True):
    """The row is damaged and no worker holds the task. The task fails without a fetch."""

    task: DamagedTask


Claim = Claimed | AlreadyDone | HeldByOther | NoSuchTask | Throttled | Unreadable


class Settled(msgspec.Struct, frozen=True):
    """The outcome is durable. `stats` are the counters of the shard after it.

    They are None if an earlier write, whose outcome was unknown, had already stored it, and if the
    outcome was counted together with those of other shards (`count_together`).
    """

    stats: ShardCounters | None


class LostClaim(msgspec.Struct, frozen=True):
    """Another claim or another outcome came first. The worker drops the task."""


class RunClosed(msgspec.Struct, frozen=True):
    """The run accepts no more settles: it is stopping or has ended. The worker drops the task."""


class OutcomeUnknown(msgspec.Struct, frozen=True):
    """It is unknown whether the write happened. After the claim expires, the message shows the
    task either done or free to be claimed again.
    """


class NotSettled(msgspec.Struct, frozen=True):
    """The write makes the writer crash. Nothing was written, and a retry would fail too."""


SettleVerdict = Settled | LostClaim | RunClosed | OutcomeUnknown | NotSettled


def stats_key(ref: TaskRef) -> StatsKey:
    return StatsKey(job_id=ref.job_id, run_id=ref.run_id, shard=ref.shard)


def hold_first(row: Task | None, *, nonce: str, now: float) -> Claim | None:
    """Returns the claim of a first delivery, from the row that was read for it. Returns None if the
    task must be claimed by a write: it was claimed before, or its row is damaged.
    """
    if row is None:
        return NoSuchTask()
    if isinstance(row, DamagedTask):
        return None
    if row.status in lifecycle.TASK_TERMINAL:
        return AlreadyDone()
    # A heartbeat of another worker set the end of its claim 0.
    if row.claim or row.claim_until:
        return None
    return Claimed(msgspec.structs.replace(row, started_at=now), nonce)


def claim(ref: TaskRef, *, now: float) -> Change:
    """Claims a task without attempts that is pending, or whose claim has expired.

    A claim is counted when the work starts, so that a task that crashes every worker fails in the
    end. An attempt is counted when it reports, so that a restart of a worker costs no attempt.
    """
    return Change((_claim_update(ref, lifecycle.sources(TASK, TaskEvent.CLAIMED), 0, now),))


def reclaim(ref: TaskRef, verdict: Verdict | None, *, now: float) -> Change | None:
    """Returns the claim for a task that `claim` refused because it had attempts, or because its
    claim ends impossibly late; None for any other task.

    A task that waited for its retry no longer does, so the shard's `retrying` count decreases.
    Only this second step writes to the shard: most claims are first attempts and need no such
    write.
    """
    row = verdict.row if isinstance(verdict, Stale) else None
    if not isinstance(row, Task) or row.status in lifecycle.TASK_TERMINAL:
        return None
    if isinstance(row, DamagedTask):
        return None
    is_past, is_unreal = row.claim_until < now, _is_unreal(row, now)
    if not (is_unreal or (is_past and row.attempts)):
        return None
    taken = _claim_update(ref, frozenset({row.status}), row.attempts, now)
    if is_unreal:
        as_seen = (("attempts", row.attempts), ("claim_until", row.claim_until))
        guard = Guard(status_in=frozenset({row.status}), equals=as_seen)
        taken = msgspec.structs.replace(taken, guard=guard)
    if row.status not in lifecycle.TASK_CLAIMED:
        return SettleChange((taken, _count(ref, _TAKES_RELEASES, {"retrying": -1})))
    return Change((taken,))


def _is_unreal(task: Task, now: float) -> bool:
    """Whether a claim ends later than a claim made now would end.

    Then a clock was set back, or was ahead when the claim was made. Such a claim need not be
    respected: a live holder renews it with the current clock, and the new claim number fences off
    the old holder.
    """
    return timing.is_unreal(task.claim_until, now=now, ttl_s=limits.CLAIM_TTL_S)


def _claim_update(
    ref: TaskRef, sources: frozenset[TaskStatus], attempts: int, now: float
) -> Update:
    values = {
        "status": lifecycle.target(TASK, TaskEvent.CLAIMED),
        "claim_until": now + limits.CLAIM_TTL_S,
        "started_at": now,
        "updated_at": now,
    }
    facts = (("attempts", attempts),)
    guard = Guard(status_in=sources, equals=facts, lapsed=("claim_until", now))
    return Update(TaskKey.of(ref), guard, values, {"claim": 1})


# The state that the counter row of a shard must have when an outcome, or a release, is counted. A
# stopping run refuses outcomes, so that its counters are frozen. It still accepts releases.
_TAKES_OUTCOMES = Guard(status_in=SETTLES_PASS)
_TAKES_RELEASES = Guard(status_in=RELEASES_PASS)


def _count(ref: TaskRef, guard: Guard, counts: dict[str, int]) -> Update:
    return Update(stats_key(ref), guard, {}, counts)


def count_together(change: SettleChange, shard: int) -> SettleChange:
    """Counts a settle of a run with several shards on the counter row of `shard`, whichever shard
    its task is in. So the settles of one worker share one write to a counter row (decision 0039).

    Only the sum of the counter rows of a run is read, and every row has the same state, so each of
    them may count an ended task. A change of `retrying` stays with the shard of its task, because
    the change that reverts it is written there: no counter falls below zero. The row that is
    written says nothing about its shard any more, so the settle does not return it.
    """
    count = change.count
    key = count.key
    assert isinstance(key, StatsKey)
    if "retrying" not in count.deltas:
        key = StatsKey(key.job_id, key.run_id, shard)
    quiet = msgspec.structs.replace(count, key=key, is_quiet=True)
    return SettleChange((change.flip, quiet))


def claim_result(verdict: Verdict | None, *, now: float) -> Claim:
    if verdict is None:  # Unknown outcome. If the claim was stored, it expires like any other.
        return HeldByOther(until=now + limits.CLAIM_TTL_S)
    if isinstance(verdict, Applied):
        row = verdict.rows[0]
        assert isinstance(row, Task)
        return Unreadable(row) if isinstance(row, DamagedTask) else Claimed(row)
    if (
        isinstance(verdict, Missing)
        or verdict.row is None
        or isinstance(verdict.row, ShardCounters)
    ):
        return NoSuchTask()  # The counters are closed, so the run has ended.
    assert isinstance(verdict.row, Task)
    if verdict.row.status in lifecycle.TASK_TERMINAL:
        return AlreadyDone()
    if isinstance(verdict.row, DamagedTask) and not _is_held(verdict.row, now):
        return Unreadable(verdict.row)
    until = max(verdict.row.claim_until, now)
    # If its end is impossible, another worker took the task over first. Retry at once.
    return HeldByOther(until=now if _is_unreal(verdict.row, now) else until)


def _is_held(task: DamagedTask, now: float) -> bool:
    """Whether a worker may have claimed the task before its row was damaged. That worker has the
    undamaged task and may still settle it."""
    if {"status", "claim", "claim_until", "attempts"} & {*task.damaged}:
        return False
    return now <= task.claim_until and not _is_unreal(task, now)


def extend_claim(ref: TaskRef, task: Task, *, now: float) -> Change:
    """Extends a claim (heartbeat). The store refuses it after another worker took the task.

    For claim 0 this is the first write. From then on the row shows that the task is processed, and
    a worker that receives its message a second time waits for the end of the claim.
    """
    values = {
        "status": lifecycle.target(TASK, TaskEvent.EXTENDED),
        "claim_until": now + limits.CLAIM_TTL_S,
        "started_at": task.started_at,
    }
    return Change((Update(TaskKey.of(ref), _mine(task, TaskEvent.EXTENDED), values),))


# The visibility that a message must still have after one missed heartbeat: time for a slow call.
_SPARE_S = 5.0


def renewal_due_s(*, heartbeat_s: float) -> float:
    """Returns the age at which a heartbeat renews a message and a claim."""
    return min(limits.VISIBILITY_S / 2, limits.VISIBILITY_S - 2 * heartbeat_s - _SPARE_S)


def is_written(task: Task, *, now: float) -> bool:
    """Whether the row may show the claim under which a worker holds `task`. A first delivery writes
    nothing until a heartbeat renews it."""
    age_s = now - (task.started_at or 0.0)
    return task.claim > 0 or not 0 <= age_s < renewal_due_s(heartbeat_s=limits.HEARTBEAT_S)


def lost_workers_problem(task: Task) -> Problem | None:
    """Returns the problem of a task that lost too many workers, else None.

    Each earlier claim without a report and without a release is a lost worker. The latest claim is
    the current one and does not count. A worker that died under claim 0 has left no trace, so a
    task may lose one worker more than the limit.
    """
    lost = task.claim - 1 - task.attempts - task.handed_back
    return errors.worker_lost(lost) if lost > limits.LOST_WORKERS_MAX else None


LOST_WORKER_REASON = FailureReason.OTHER


class Cost(msgspec.Struct, frozen=True):
    """The cost of one attempt."""

    credits: int = 0
    cost_micros: int = 0


def succeed(ref: TaskRef, task: Task, result: Result, *, spent: Cost, now: float) -> Change:
    values = {"result": result, "problem": None, "reason": None}
    counts = {"done": 1, "successful": 1, "stored_bytes": result.size_bytes}
    return _settle(ref, task, TaskEvent.SUCCEEDED, values, counts, (None, spent, now))


def fail(
    ref: TaskRef,
    task: Task,
    reason: FailureReason,
    problem: Problem,
    *,
    spent: Cost,
    now: float,
) -> Change:
    values = {"problem": problem, "reason": reason}
    counts = {"done": 1, "failed": 1, reason.value: 1}
    return _settle(ref, task, TaskEvent.FAILED, values, counts, (problem, spent, now))


def share(ref: TaskRef, duplicate: Task, original: Task, *, now: float) -> Change:
    """Ends a duplicate as its original has ended. It counts as an attempt without a cost. The body
    is stored once, as that of the original, and its bytes are counted once."""
    if original.problem is not None or original.result is None:
        reason = original.reason or FailureReason.OTHER
        problem = original.problem or errors.row_damaged(("result",))
        return fail(ref, duplicate, reason, problem, spent=Cost(), now=now)
    values = {
        "result": original.result,
        "source_run_id": original.source_run_id,
        "problem": None,
        "reason": None,
    }
    counts = {"done": 1, "successful": 1}
    return _settle(ref, duplicate, TaskEvent.SUCCEEDED, values, counts, (None, Cost(), now))


def as_fetched_with(duplicate: Task, original: Task) -> Task:
    """Returns the claimed duplicate with the start of the fetch that it shares. The age of a body
    is taken from the history, and this body is as old as that fetch."""
    fetched_at = original.history[-1].started_at if original.history else original.created_at
    return msgspec.structs.replace(duplicate, started_at=fetched_at)


def fail_unreadable(ref: TaskRef, task: DamagedTask, *, now: float) -> Change:
    """Fails a task whose row is damaged, and makes the row readable: placeholders replace the lost
    fields.

    No claim is necessary: a worker that settled or claimed the task meanwhile has changed a field
    that the guard checks. Claim 0 marks a row that must not be fetched, so a rerun does not fetch
    it either.
    """
    problem = errors.row_damaged(task.damaged)
    values = {
        **{name: getattr(task, name) for name in task.damaged},
        "status": lifecycle.target(TASK, TaskEvent.FAILED),
        "claim": 0,
        "claim_until": 0.0,
        "attempts": task.attempts + 1,
        "history": _history(task, problem, Cost(), now),
        "updated_at": now,
        "problem": problem,
        "reason": FailureReason.OTHER,
        "result": None,
    }
    known: dict[str, Any] = {"claim": task.claim, "claim_until": task.claim_until}
    if "status" in task.damaged:
        known |= {"result": None, "reason": None}
    equals = tuple((name, value) for name, value in known.items() if name not in task.damaged)
    status_in = None if "status" in task.damaged else frozenset({task.status})
    flip = Update(TaskKey.of(ref), Guard(status_in=status_in, equals=equals), values, is_quiet=True)
    counts = {"done": 1, "failed": 1, FailureReason.OTHER.value: 1}
    if task.attempts and task.status not in lifecycle.TASK_CLAIMED:
        counts["retrying"] = -1
    return SettleChange((flip, _count(ref, _TAKES_OUTCOMES, counts)))


def release_for_retry(
    ref: TaskRef, task: Task, problem: Problem, *, spent: Cost, now: float
) -> Change:
    """Counts a failed attempt and frees the task. The same message, visible later, retries it."""
    return _settle(ref, task, TaskEvent.RELEASED, {}, {"retrying": 1}, (problem, spent, now))


def release_claim(
    ref: TaskRef,
    task: Task,
    *,
    spent: Cost | None = None,
    problem: Problem | None = None,
    now: float,
) -> Change:
    """Releases a claim without an outcome. No attempt is counted.

    A cost is counted, and the history then contains it with its `problem`.
    """
    money = _money(spent or Cost())
    values: dict[str, Any] = {
        "status": lifecycle.target(TASK, TaskEvent.RELEASED),
        "claim_until": 0.0,
        "updated_at": now,
    }
    if spent is not None and money:
        values["history"] = _history(task, problem, spent, now)
    deltas = {"handed_back": 1, **_first_write(task), **money}
    update = Update(TaskKey.of(ref), _mine(task, TaskEvent.RELEASED), values, deltas)
    between_tries = {"retrying": 1} if task.attempts else {}
    return SettleChange((update, _count(ref, _TAKES_RELEASES, {**between_tries, **money})))


def may_retry(
    task: Task,
    reason: FailureReason,
    *,
    attempts_max: int,
    retry_after_s: float | None,
    random: Random,
) -> float | None:
    """Seconds until the next attempt, or None if this was the last one."""
    attempt = task.attempts + 1
    if attempt >= attempts_max:
        return None
    return retry_delay_s(reason, attempt=attempt, retry_after_s=retry_after_s, random=random)


def settle_result(verdict: Verdict, task: Task) -> SettleVerdict:
    """Interprets the verdict of the store on a settle or release of this claim of `task`.

    If an earlier write of this worker, whose outcome was unknown, causes the refusal, the task is
    settled.
    """
    if isinstance(verdict, Applied):
        stats = verdict.rows[1]
        if stats is None:
            return Settled(None)
        assert isinstance(stats, ShardCounters)
        assert stats.done <= stats.admitted, "more tasks are done than were admitted"
        return Settled(stats)
    if isinstance(verdict, Missing):
        return RunClosed()
    row = verdict.row
    if isinstance(row, ShardCounters):
        return RunClosed()
    assert isinstance(row, Task)
    return Settled(None) if _has_settled(row, task) else LostClaim()


def _has_settled(row: Task, task: Task) -> bool:
    """Whether the row shows a settle of this claim of `task`: one more attempt under its number. A
    release, the other write under the same number, adds no attempt."""
    if task.claim:
        return row.claim == task.claim and row.attempts > task.attempts
    # The first written claim has the same number as a settled claim 0. It started at another time.
    return (row.claim, row.attempts) == (1, 1) and row.history[-1].started_at == task.started_at


def may_be_drained(settled: Settled) -> bool:
    """Whether the shard may have no task left, so that the run may be complete. Without counters
    that is unknown."""
    return settled.stats is None or settled.stats.done >= settled.stats.admitted


def failure_reason_of(change: Change) -> FailureReason | None:
    """Returns the reason that a settle counts its task as failed under; None if it does not."""
    for write in change.writes:
        if isinstance(write, Update) and "failed" in write.deltas:
            return next(reason for reason in FailureReason if reason in write.deltas)
    return None


def _mine(task: Task, event: TaskEvent) -> Guard:
    sources = lifecycle.sources_under_claim(event, task.claim)
    return Guard(status_in=sources, equals=(("claim", task.claim),))


def _first_write(task: Task) -> dict[str, int]:
    """Returns the delta that replaces claim 0 by claim 1 when the task is settled or released, so
    that another worker that holds claim 0 is refused."""
    return {} if task.claim else {"claim": 1}


def _money(spent: Cost) -> dict[str, int]:
    amounts = {"credits": spent.credits, "cost_micros": spent.cost_micros}
    return {field: amount for field, amount in amounts.items() if amount}


def _history(task: Task, problem: Problem | None, spent: Cost, now: float) -> tuple[Attempt, ...]:
    """Returns the history with this attempt. Paid calls that count as no attempt are not bounded,
    so only the latest entries are kept."""
    attempt = Attempt(
        number=task.history[-1].number + 1 if task.history else task.attempts + 1,
        started_at=task.started_at or now,
        ended_at=now,
        problem=problem,
        credits=spent.credits,
        cost_micros=spent.cost_micros,
    )
    return (*task.history, attempt)[-limits.HISTORY_MAX :]


def _settle(
    ref: TaskRef,
    task: Task,
    event: TaskEvent,
    values: dict[str, Any],
    counts: dict[str, int],
    ending: tuple[Problem | None, Cost, float],
) -> Change:
    problem, spent, now = ending
    money = _money(spent)
    flip = {
        "status": lifecycle.target(TASK, event),
        "claim_until": 0.0,
        "history": _history(task, problem, spent, now),
        "started_at": task.started_at,
        "updated_at": now,
        **values,
    }
    deltas = {"attempts": 1, **_first_write(task), **money}
    guard = _TAKES_RELEASES if event is TaskEvent.RELEASED else _TAKES_OUTCOMES
    return SettleChange(
        (
            Update(TaskKey.of(ref), _mine(task, event), flip, deltas, is_quiet=True),
            _count(ref, guard, {**counts, **money}),
        )
    )


# The delay before a failed attempt is repeated (SPEC.md 4.5), and the back-off of other modules.


class Backoff(msgspec.Struct, frozen=True):
    first_s: float
    delay_s_max: float


# Errors that often disappear at once are retried quickly. A rate limit or a block needs time, and
# an early retry would make it worse.
_QUICK = Backoff(first_s=1.0, delay_s_max=60.0)
BACKOFF: Mapping[FailureReason, Backoff] = {
    FailureReason.RATE_LIMITED: Backoff(first_s=5.0, delay_s_max=300.0),
    FailureReason.BLOCKED: Backoff(first_s=2.0, delay_s_max=120.0),
    FailureReason.TIMEOUT: Backoff(first_s=2.0, delay_s_max=120.0),
    FailureReason.GATEWAY_ERROR: _QUICK,
    FailureReason.BAD_TARGET: _QUICK,
    FailureReason.AUTH_FAILED: _QUICK,
    FailureReason.OTHER: _QUICK,
}
# A site must not delay a run for longer with one header.
RETRY_AFTER_S_MAX = 3600.0


def retry_delay_s(
    reason: FailureReason, *, attempt: int, retry_after_s: float | None, random: Random
) -> float:
    """Returns a delay that doubles per attempt, with jitter, and never less than Retry-After."""
    backoff = BACKOFF[reason]
    ceiling = backoff_s(attempt - 1, first_s=backoff.first_s, delay_s_max=backoff.delay_s_max)
    requested_s = min(max(retry_after_s or 0.0, 0.0), RETRY_AFTER_S_MAX)
    return max(jitter_s(ceiling, random), requested_s)
