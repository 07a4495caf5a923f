"""A run's counters are the sum of its shards', and every reason has its counter."""

from __future__ import annotations

from conveyor.domain.model import FailureReason, ShardCounters, Totals
from conveyor.domain.queries import sum_stats
from tests.builders import a_stats


def test_totals_are_the_sum_over_shards() -> None:
    rows = [
        a_stats(0, admitted=5, done=3, successful=2, failed=1, blocked=1, credits=7),
        a_stats(1, admitted=4, done=2, failed=2, blocked=1, timeout=1, cost_micros=9),
    ]

    assert sum_stats(rows) == Totals(
        admitted=9,
        done=5,
        successful=2,
        failed=3,
        reasons={"blocked": 2, "timeout": 1},
        credits=7,
        cost_micros=9,
    )


def test_the_totals_of_no_rows_are_zero() -> None:
    assert sum_stats([]) == Totals()


def test_every_failure_reason_has_a_counter() -> None:
    assert {reason.value for reason in FailureReason} <= set(ShardCounters.__struct_fields__)
