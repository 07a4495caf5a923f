"""The series of a run: what ended in each minute (docs/api.md, Series).

The sweeper stores a sample of the run's counters once a minute. The series is made of the
differences between two samples, and ends with the current counters. So its sum is always equal to
the counters, whatever samples a crash or an outage has prevented: a missing one makes a bucket
longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from conveyor.domain import limits
from conveyor.domain.changes import Change, Guard, Insert, RunKey, SampleKey, Update
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import CounterSample, FailureReason, Run, Totals

_MINUTE_S = 60


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """What ended, was stored and was charged between two times."""

    since: float
    until: float
    successful: int
    reasons: dict[str, int]
    stored_bytes: int
    credits: int
    cost_micros: int

    @property
    def failed(self) -> int:
        return sum(self.reasons.values())


def take_sample(run: Run, totals: Totals, *, now: float, tasks_min: int) -> Change | None:
    """Builds the change that stores a sample; None if this minute has one, or if fewer than
    `tasks_min` tasks have ended since the latest.

    The run's row is part of the change: no sample is stored after the end or the deletion of the
    run, and of two sweepers one stores it.
    """
    minute = _minute_of(run, now, now)
    last_at = run.created_at if run.sampled_at is None else run.sampled_at
    if minute == _minute_of(run, last_at, now) or totals.done - run.sampled_done < tasks_min:
        return None
    guard = Guard(status_in=RUN_LIVE, equals=(("sampled_at", run.sampled_at),))
    values = {"sampled_at": now, "sampled_done": totals.done}
    sample = _sample(run, totals, minute, now)
    return Change(
        (
            Update(RunKey(run.job_id, run.run_id), guard, values, is_quiet=True),
            Insert(SampleKey(run.job_id, run.run_id, minute), sample),
        )
    )


def _minute_of(run: Run, at: float, now: float) -> int:
    """The minute of a time. In a long run it is the first of several minutes that share a sample:
    their number doubles each time that the age of the run doubles, so that a run of any age has
    few samples."""
    width = 1
    while now - run.created_at > width * limits.SERIES_MINUTES * _MINUTE_S:
        width *= 2
    return int(at // (width * _MINUTE_S)) * width


def _sample(run: Run, totals: Totals, minute: int, at: float) -> CounterSample:
    return CounterSample(
        run.job_id,
        run.run_id,
        minute,
        at,
        totals.successful,
        totals.reasons,
        totals.stored_bytes,
        totals.credits,
        totals.cost_micros,
    )


def make_series(
    run: Run, samples: Iterable[CounterSample], totals: Totals, *, now: float
) -> list[Bucket]:
    """Returns the buckets of a run, oldest first, from samples in the order of their minutes. Their
    sum is `totals`.

    A sample that a wrong clock has put into another minute does not fit between its neighbours, and
    is left out.
    """
    ends_at = max(run.created_at, now if run.ended_at is None else run.ended_at)
    last = _sample(run, totals, 0, ends_at)
    before = CounterSample(run.job_id, run.run_id, 0, run.created_at)
    buckets: list[Bucket] = []
    for sample in samples:
        if _is_between(before, sample, last):
            buckets.append(_difference(before, sample))
            before = sample
    buckets.append(_difference(before, last))
    while len(buckets) > limits.SERIES_BUCKETS_MAX:
        buckets = [_joined(buckets[at : at + 2]) for at in range(0, len(buckets), 2)]
    return buckets


def _is_between(before: CounterSample, sample: CounterSample, last: CounterSample) -> bool:
    return before.at < sample.at < last.at and all(
        low <= count <= high
        for low, count, high in zip(_counts(before), _counts(sample), _counts(last), strict=True)
    )


def _counts(sample: CounterSample) -> list[int]:
    reasons = [sample.reasons.get(reason, 0) for reason in FailureReason]
    return [
        sample.successful,
        sample.stored_bytes,
        sample.credits,
        sample.cost_micros,
        *reasons,
    ]


def _difference(first: CounterSample, last: CounterSample) -> Bucket:
    reasons = {
        reason: count
        for reason in last.reasons
        if (count := last.reasons[reason] - first.reasons.get(reason, 0))
    }
    return Bucket(
        since=first.at,
        until=last.at,
        successful=last.successful - first.successful,
        reasons=reasons,
        stored_bytes=last.stored_bytes - first.stored_bytes,
        credits=last.credits - first.credits,
        cost_micros=last.cost_micros - first.cost_micros,
    )


def _joined(buckets: list[Bucket]) -> Bucket:
    reasons: Counter[str] = Counter()
    for bucket in buckets:
        reasons.update(bucket.reasons)
    return Bucket(
        since=buckets[0].since,
        until=buckets[-1].until,
        successful=sum(bucket.successful for bucket in buckets),
        reasons=dict(reasons),
        stored_bytes=sum(bucket.stored_bytes for bucket in buckets),
        credits=sum(bucket.credits for bucket in buckets),
        cost_micros=sum(bucket.cost_micros for bucket in buckets),
    )
