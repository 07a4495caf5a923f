"""Auditing: recounts the rows of a run and compares them with its counters (docs/api.md, Audit).

While a run is live, rows and counters change during the recount. Every compared counter only grows,
so a correct recount lies between the counters before it and the counters after it. After the run
has ended, all three are equal.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from conveyor.domain.ids import TaskId
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL
from conveyor.domain.model import FailureReason, Run, Task, TaskStatus, Totals


class Difference(msgspec.Struct, frozen=True):
    """A counter that differs from the recount."""

    what: str  #: The name of the counter.
    recorded: int  #: Its value.
    counted: int  #: The value that the recount found.


class BadBody(msgspec.Struct, frozen=True):
    """A stored body that is missing, or does not match its task."""

    task_id: TaskId  #: The task.
    problem: str  #: What is wrong with its body.


def count_row(counts: Counter[str], row: Task) -> None:
    """Adds a row to a recount."""
    counts["admitted"] += 1
    if row.status in TASK_TERMINAL:
        counts["done"] += 1
        counts[row.status.value] += 1
    if row.status is TaskStatus.FAILED:
        counts[(row.reason or FailureReason.BAD_TARGET).value] += 1
    if row.status is TaskStatus.PENDING and row.attempts:
        counts["retrying"] += 1
    if row.source_run_id is None:  # The run that fetched an inherited result has its cost.
        counts["credits"] += row.credits
        counts["cost_micros"] += row.cost_micros


def recorded(totals: Totals) -> dict[str, int]:
    """The counters under the names of a recount."""
    counts = {reason.value: totals.reasons.get(reason, 0) for reason in FailureReason}
    names = ("admitted", "done", "successful", "failed", "credits", "cost_micros", "retrying")
    return {name: getattr(totals, name) for name in names} | counts


def compare(run: Run, counts: Counter[str], before: Totals, after: Totals) -> list[Difference]:
    """Returns the counters that contradict the rows. `run` was read after the recount."""
    low, high = recorded(before), recorded(after)
    is_live = run.status in RUN_LIVE
    if is_live:  # This counter also shrinks, so the range says nothing.
        del low["retrying"]
    differences = [
        Difference(name, high[name], counts[name])
        for name, least in low.items()
        if not least <= counts[name] <= high[name]
    ]
    if not is_live and not run.open_batches and run.total != counts["admitted"]:
        differences.append(Difference("total", run.total, counts["admitted"]))
    return differences
