"""What a claim and an outcome do to a task and to its run's counters (SPEC.md 4.4).

A claim is a number: settling, retrying and handing back are all fenced by it, so a worker that
lost its claim can change nothing. The flip of a task and the count of its shard are one change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from conveyor.domain import clock_step, lifecycle, limits, problems
from conveyor.domain.changes import (
    Applied,
    Change,
    Guard,
    Missing,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
)
from conveyor.domain.damage import DamagedTask
from conveyor.domain.lifecycle import RELEASES_PASS, SETTLES_PASS, TASK
from conveyor.domain.model import (
    Attempt,
    CounterState,
    FailureReason,
    Problem,
    Result,
    ShardCounters,
    Task,
    TaskRef,
    TaskStatus,
)
from conveyor.domain.randomness import Random


class Claimed(msgspec.Struct, frozen=True):
    """The task is ours until `task.claim_until`, under `task.claim`."""

    task: Task


class AlreadyDone(msgspec.Struct, frozen=True):
    """The task is terminal: look whether the run is complete, then ack."""


class HeldByOther(msgspec.Struct, frozen=True):
    """Somebody else has a live claim until then."""

    until: float


class NoSuchTask(msgspec.Struct, frozen=True):
    """There is no row: deleted, or not visible yet; or its run has ended."""


class Throttled(msgspec.Struct, frozen=True):
    """The store had no room for the claim just now, and wrote nothing."""


class Unreadable(msgspec.Struct, frozen=True):
    """The row is damaged, and nobody works on the task: it fails without being fetched."""

    task: DamagedTask


Claim = Claimed | AlreadyDone | HeldByOther | NoSuchTask | Throttled | Unreadable


class Settled(msgspec.Struct, frozen=True):
    """The flip is durable; `stats` are the shard's counters right after it.

    They are None when it was an earlier try of unknown outcome that got through.
    """

    stats: ShardCounters | None


class LostClaim(msgspec.Struct, frozen=True):
    """Another claim, or another outcome, came first. Let go."""


class RunClosed(msgspec.Struct, frozen=True):
    """The run takes no more settles: it is being stopped, or has ended. Let go."""


class OutcomeUnknown(msgspec.Struct, frozen=True):
    """Nobody knows whether it was written. The claim lapses, and the task comes back or is done."""


class NotSettled(msgspec.Struct, frozen=True):
    """Writing it crashes the writer: nothing was written, and nothing would be."""


SettleVerdict = Settled | LostClaim | RunClosed | OutcomeUnknown | NotSettled


def task_key(ref: TaskRef) -> TaskKey:
    return TaskKey(job_id=ref.job_id, run_id=ref.run_id, task_id=ref.task_id, shard=ref.shard)


def stats_key(ref: TaskRef) -> StatsKey:
    return StatsKey(job_id=ref.job_id, run_id=ref.run_id, shard=ref.shard)


def claim(ref: TaskRef, *, now: float) -> Change:
    """Takes a task that was never tried and waits, or whose claim has lapsed.

    Claims are counted when work starts, so that a task that kills its worker comes to an end;
    attempts when they report, so that a worker that was merely restarted costs the task none.
    """
    return Change((_taken(ref, lifecycle.sources(TASK, "claimed"), 0, now),))


def reclaim(ref: TaskRef, verdict: Verdict | None, *, now: float) -> Change | None:
    """Takes a task that `claim` was refused for having been tried before, or for a claim that no
    clock like ours can have made; None for any other.

    One that waits for its next try is no longer between tries, and its shard counts that. Only
    here: a first try, which is what most claims are, costs its shard no write.
    """
    row = verdict.row if isinstance(verdict, Stale) else None
    if not isinstance(row, Task) or row.status in lifecycle.TASK_TERMINAL:
        return None
    if isinstance(row, DamagedTask):
        return None
    is_past, is_unreal = row.claim_until < now, _is_unreal(row, now)
    if not (is_unreal or (is_past and row.attempts)):
        return None
    taken = _taken(ref, frozenset({row.status}), row.attempts, now)
    if is_unreal:
        as_seen = (("attempts", row.attempts), ("claim_until", row.claim_until))
        guard = Guard(status_in=frozenset({row.status}), equals=as_seen)
        taken = msgspec.structs.replace(taken, guard=guard)
    if row.status not in lifecycle.sources(TASK, "released"):
        return Change((taken, _count(ref, RELEASES_PASS, {"retrying": -1})))
    return Change((taken,))


def _is_unreal(task: Task, now: float) -> bool:
    """A claim that ends further ahead than any made now would: a clock was set back since, or was
    ahead when it was made. It guards nothing: whoever made it renews it by today's clock, or is
    gone, and its number fences it off in any case."""
    return clock_step.is_unreal(task.claim_until, now=now, ttl_s=limits.CLAIM_TTL_S)


def _taken(ref: TaskRef, sources: frozenset[TaskStatus], attempts: int, now: float) -> Update:
    values = {
        "status": lifecycle.target(TASK, "claimed"),
        "claim_until": now + limits.CLAIM_TTL_S,
        "started_at": now,
        "updated_at": now,
    }
    facts = (("attempts", attempts),)
    guard = Guard(status_in=sources, equals=facts, lapsed=("claim_until", now))
    return Update(task_key(ref), guard, values, {"claim": 1})


def _count(ref: TaskRef, gate: frozenset[CounterState], counts: dict[str, int]) -> Update:
    return Update(stats_key(ref), Guard(status_in=gate), {}, counts)


def claim_result(verdict: Verdict | None, *, now: float) -> Claim:
    if verdict is None:  # Nobody knows. It may be ours, which lapses as another's would.
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
        return NoSuchTask()  # With its counters shut, the run has ended.
    assert isinstance(verdict.row, Task)
    if verdict.row.status in lifecycle.TASK_TERMINAL:
        return AlreadyDone()
    if isinstance(verdict.row, DamagedTask) and not _is_held(verdict.row, now):
        return Unreadable(verdict.row)
    until = max(verdict.row.claim_until, now)
    # Where its end cannot be believed, another was quicker to take it over.
    return HeldByOther(until=now if _is_unreal(verdict.row, now) else until)


def _is_held(task: DamagedTask, now: float) -> bool:
    """Whether a worker may have claimed the task before its row was damaged: it knows the task as
    it was, and may still settle it."""
    if {"status", "claim", "claim_until", "attempts"} & {*task.damaged}:
        return False
    return now <= task.claim_until and not _is_unreal(task, now)


def extend_claim(ref: TaskRef, claim_number: int, *, now: float) -> Change:
    """A heartbeat: refused as soon as the claim is no longer ours."""
    guard = Guard(status_in=lifecycle.sources(TASK, "succeeded"), equals=(("claim", claim_number),))
    return Change((Update(task_key(ref), guard, {"claim_until": now + limits.CLAIM_TTL_S}),))


def lost_workers_problem(task: Task) -> Problem | None:
    """Why a freshly claimed task may not be tried again: it keeps losing its workers.

    Earlier claims that neither reported nor were handed back are workers that were lost.
    """
    lost = task.claim - 1 - task.attempts - task.handed_back
    return problems.worker_lost(lost) if lost > limits.LOST_WORKERS_MAX else None


LOST_WORKER_REASON = FailureReason.OTHER


class Cost(msgspec.Struct, frozen=True):
    """What one try cost."""

    credits: int = 0
    cost_micros: int = 0


def succeed(ref: TaskRef, task: Task, result: Result, *, spent: Cost, now: float) -> Change:
    values = {"result": result, "problem": None, "reason": None}
    counts = {"done": 1, "successful": 1, "stored_bytes": result.size_bytes}
    return _settle(ref, task, "succeeded", values, counts, (None, spent, now))


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
    return _settle(ref, task, "failed", values, counts, (problem, spent, now))


def fail_unreadable(ref: TaskRef, task: DamagedTask, *, now: float) -> Change:
    """Ends a task whose row is damaged, and makes the row readable: stand-ins are stored in the
    places of what is lost.

    No claim is needed: whatever settled the task or took it meanwhile has changed what the guard
    names. Claim 0 marks a row that was never fit to be fetched, so no rerun fetches it either.
    """
    problem = problems.row_damaged(task.damaged)
    values = {
        **{name: getattr(task, name) for name in task.damaged},
        "status": lifecycle.target(TASK, "failed"),
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
    flip = Update(task_key(ref), Guard(status_in=status_in, equals=equals), values, is_quiet=True)
    counts = {"done": 1, "failed": 1, FailureReason.OTHER.value: 1}
    if task.attempts and task.status not in lifecycle.sources(TASK, "released"):
        counts["retrying"] = -1
    return Change((flip, _count(ref, SETTLES_PASS, counts)))


def release_for_retry(
    ref: TaskRef, task: Task, problem: Problem, *, spent: Cost, now: float
) -> Change:
    """The try failed and another one follows, by the same message made visible later."""
    return _settle(ref, task, "released", {}, {"retrying": 1}, (problem, spent, now))


def release_claim(
    ref: TaskRef,
    task: Task,
    *,
    spent: Cost | None = None,
    problem: Problem | None = None,
    now: float,
) -> Change:
    """The work was cut off before an outcome: no attempt is counted. What it cost is, and then the
    history shows it with its `problem`."""
    money = _money(spent or Cost())
    values: dict[str, Any] = {
        "status": lifecycle.target(TASK, "released"),
        "claim_until": 0.0,
        "updated_at": now,
    }
    if spent is not None and money:
        values["history"] = _history(task, problem, spent, now)
    update = Update(task_key(ref), _mine(task, "released"), values, {"handed_back": 1, **money})
    between_tries = {"retrying": 1} if task.attempts else {}
    return Change((update, _count(ref, RELEASES_PASS, {**between_tries, **money})))


def may_retry(
    task: Task,
    reason: FailureReason,
    *,
    attempts_max: int,
    retry_after_s: float | None,
    random: Random,
) -> float | None:
    """Seconds to wait before the next try, or None when this was the last one."""
    attempt = task.attempts + 1
    if attempt >= attempts_max:
        return None
    return retry_delay_s(reason, attempt=attempt, retry_after_s=retry_after_s, random=random)


def settle_result(verdict: Verdict, task: Task) -> SettleVerdict:
    """Reads the store's verdict on a settle or release of this claim of `task`.

    A refusal by our own earlier try, whose outcome was unknown, is a settle all the same. It is
    told by the attempt that it counted: handing back, the other thing that a holder does under
    the same claim, counts none.
    """
    if isinstance(verdict, Applied):
        stats = verdict.rows[1]
        assert isinstance(stats, ShardCounters)
        assert stats.done <= stats.admitted, "more tasks are done than were admitted"
        return Settled(stats)
    if isinstance(verdict, Missing):
        return RunClosed()
    row = verdict.row
    if isinstance(row, ShardCounters):
        return RunClosed()
    assert isinstance(row, Task)
    if row.claim == task.claim and row.attempts > task.attempts:
        return Settled(None)
    return LostClaim()


def may_be_drained(settled: Settled) -> bool:
    """Nothing admitted to this shard may be left, so the run may be complete."""
    return settled.stats is None or settled.stats.done >= settled.stats.admitted


def _mine(task: Task, event: str) -> Guard:
    return Guard(status_in=lifecycle.sources(TASK, event), equals=(("claim", task.claim),))


def _money(spent: Cost) -> dict[str, int]:
    amounts = {"credits": spent.credits, "cost_micros": spent.cost_micros}
    return {field: amount for field, amount in amounts.items() if amount}


def _history(task: Task, problem: Problem | None, spent: Cost, now: float) -> tuple[Attempt, ...]:
    """The task's history with this try. Calls that were paid for without counting as an attempt
    have no bound of their own, so only the latest entries are kept."""
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
    event: str,
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
        "updated_at": now,
        **values,
    }
    gate: frozenset[CounterState] = RELEASES_PASS if event == "released" else SETTLES_PASS
    return Change(
        (
            Update(
                task_key(ref), _mine(task, event), flip, {"attempts": 1, **money}, is_quiet=True
            ),
            _count(ref, gate, {**counts, **money}),
        )
    )


# How long to wait before a failed try is made again (SPEC.md 4.5); the back-off of all others.


class Backoff(msgspec.Struct, frozen=True):
    first_s: float
    delay_s_max: float


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
RETRY_AFTER_S_MAX = 3600.0

# 2 ** 64 times the first delay is above every bound; a larger exponent would overflow a float.
_DOUBLINGS_MAX = 64


def backoff_s(doublings: int, *, first_s: float, delay_s_max: float) -> float:
    """The first delay, doubled so many times, up to a bound."""
    return min(delay_s_max, first_s * 2.0 ** min(doublings, _DOUBLINGS_MAX))


def jitter_s(delay_s: float, random: Random) -> float:
    """From half of a delay to all of it: those who failed together do not come back together."""
    return delay_s * random.uniform(0.5, 1.0)


def retry_delay_s(
    reason: FailureReason, *, attempt: int, retry_after_s: float | None, random: Random
) -> float:
    """Doubles per attempt, jittered down to half, and never sooner than the site asked for."""
    backoff = BACKOFF[reason]
    ceiling = backoff_s(attempt - 1, first_s=backoff.first_s, delay_s_max=backoff.delay_s_max)
    asked = min(max(retry_after_s or 0.0, 0.0), RETRY_AFTER_S_MAX)
    return max(jitter_s(ceiling, random), asked)
