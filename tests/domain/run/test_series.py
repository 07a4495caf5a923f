"""The time series of a run: when a sample is due, and what the differences show."""

from __future__ import annotations

import itertools

import msgspec

from conveyor.domain import limits
from conveyor.domain.changes import Insert, Update
from conveyor.domain.model import CounterSample, Run, RunStatus, Totals
from conveyor.domain.run.series import Bucket, make_series, take_sample
from tests.builders import T0, a_run, a_sample

MINUTE = 60.0


def totals(successful: int, timeouts: int = 0) -> Totals:
    return Totals(
        admitted=1_000_000,
        done=successful + timeouts,
        successful=successful,
        failed=timeouts,
        reasons={"timeout": timeouts} if timeouts else {},
        credits=successful,
        cost_micros=10 * successful,
        stored_bytes=100 * successful,
    )


def sampled(run: Run, counters: Totals, now: float) -> tuple[Run, CounterSample] | None:
    """The run and its new sample, if one is due."""
    change = take_sample(run, counters, now=now, tasks_min=1)
    if change is None:
        return None
    note, insert = change.writes
    assert isinstance(note, Update)
    assert isinstance(insert, Insert)
    assert isinstance(insert.row, CounterSample)
    return msgspec.structs.replace(run, **note.values), insert.row


def test_at_most_one_sample_is_taken_a_minute() -> None:
    run = a_run(created_at=T0)

    first = sampled(run, totals(5), T0 + MINUTE)
    assert first is not None
    run, _ = first

    assert sampled(run, totals(9), T0 + MINUTE + 1) is None
    assert sampled(run, totals(9), T0 + 2 * MINUTE) is not None


def test_no_sample_is_taken_until_enough_tasks_have_ended() -> None:
    run = a_run(created_at=T0, sampled_at=T0 + MINUTE, sampled_done=5)

    assert take_sample(run, totals(5), now=T0 + 9 * MINUTE, tasks_min=1) is None
    assert take_sample(run, totals(104), now=T0 + 9 * MINUTE, tasks_min=100) is None
    assert take_sample(run, totals(105), now=T0 + 9 * MINUTE, tasks_min=100) is not None


def test_a_sample_needs_a_live_run_and_no_newer_sample() -> None:
    run = a_run(created_at=T0, sampled_at=T0 + MINUTE, sampled_done=5)

    change = take_sample(run, totals(9), now=T0 + 2 * MINUTE, tasks_min=1)

    assert change is not None
    note = change.writes[0]
    assert isinstance(note, Update)
    assert note.guard.status_in == frozenset({"running", "pending"})
    assert note.guard.equals == (("sampled_at", T0 + MINUTE),)


def test_samples_go_on_after_the_clock_was_set_back() -> None:
    run = a_run(created_at=T0, sampled_at=T0 + 86_400, sampled_done=5)

    assert take_sample(run, totals(9), now=T0 + 2 * MINUTE, tasks_min=1) is not None


def test_a_run_of_a_year_stays_within_the_maximum_of_samples() -> None:
    run, now, count = a_run(created_at=T0), T0, 0
    while now < T0 + 365 * 86_400:
        now += 5 * MINUTE
        taken = sampled(run, totals(int(now - T0)), now)
        if taken is not None:
            run, count = taken[0], count + 1

    assert count < limits.SAMPLES_MAX


def test_a_run_without_samples_has_one_bucket() -> None:
    run = a_run(created_at=T0, status=RunStatus.COMPLETED, ended_at=T0 + 30)

    (bucket,) = make_series(run, [], totals(7, 2), now=T0 + 9_999)

    assert (bucket.since, bucket.until) == (T0, T0 + 30)
    assert (bucket.successful, bucket.failed, bucket.reasons) == (7, 2, {"timeout": 2})
    assert (bucket.stored_bytes, bucket.credits, bucket.cost_micros) == (700, 7, 70)


def a_sample_at(minute: int, counters: Totals) -> CounterSample:
    return a_sample(
        minute,
        at=T0 + minute * MINUTE,
        successful=counters.successful,
        reasons=counters.reasons,
        stored_bytes=counters.stored_bytes,
        credits=counters.credits,
        cost_micros=counters.cost_micros,
    )


def of(buckets: list[Bucket]) -> list[tuple[int, int]]:
    return [(bucket.successful, bucket.failed) for bucket in buckets]


def test_buckets_are_the_differences_between_samples() -> None:
    samples = [a_sample_at(1, totals(10)), a_sample_at(2, totals(30, 5))]

    buckets = make_series(a_run(created_at=T0), samples, totals(31, 6), now=T0 + 150)

    assert of(buckets) == [(10, 0), (20, 5), (1, 1)]
    assert [bucket.until - T0 for bucket in buckets] == [60, 120, 150]


def test_a_sample_that_contradicts_its_neighbours_is_left_out() -> None:
    run, counters = a_run(created_at=T0), totals(31, 6)
    fits = [a_sample_at(1, totals(10)), a_sample_at(3, totals(20))]
    from_a_wrong_clock = a_sample_at(2, totals(5))
    ahead_of_the_counters = a_sample_at(4, totals(40))
    of_the_future = a_sample_at(900, totals(25))
    samples = [fits[0], from_a_wrong_clock, fits[1], ahead_of_the_counters, of_the_future]

    assert make_series(run, samples, counters, now=T0 + 300) == make_series(
        run, fits, counters, now=T0 + 300
    )


def test_a_long_series_is_merged_into_few_buckets_with_the_same_totals() -> None:
    samples = [a_sample_at(minute, totals(3 * minute, minute)) for minute in range(1, 1_500)]

    buckets = make_series(a_run(created_at=T0), samples, totals(5_000, 1_600), now=T0 + 90_000)

    assert len(buckets) <= limits.SERIES_BUCKETS_MAX
    assert sum(bucket.successful for bucket in buckets) == 5_000
    assert sum(bucket.failed for bucket in buckets) == 1_600
    assert all(one.until == two.since for one, two in itertools.pairwise(buckets))
