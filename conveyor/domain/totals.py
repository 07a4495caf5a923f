"""Totals: a run's counters, summed over its shards (SPEC.md 2.3)."""

from __future__ import annotations

import msgspec

from conveyor.domain.model import FailureReason, Stats


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A run's counters: the sum of its stats rows."""

    admitted: int = 0
    done: int = 0
    successful: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}
    credits: int = 0
    cost_micros: int = 0
    retrying: int = 0
    stored_bytes: int = 0


def sum_stats(rows: list[Stats]) -> Totals:
    reasons = {
        reason.value: count
        for reason in FailureReason
        if (count := sum(getattr(row, reason.value) for row in rows))
    }
    return Totals(
        admitted=sum(row.admitted for row in rows),
        done=sum(row.done for row in rows),
        successful=sum(row.successful for row in rows),
        failed=sum(row.failed for row in rows),
        reasons=reasons,
        credits=sum(row.credits for row in rows),
        cost_micros=sum(row.cost_micros for row in rows),
        retrying=sum(row.retrying for row in rows),
        stored_bytes=sum(row.stored_bytes for row in rows),
    )
