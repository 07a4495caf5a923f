"""Choosing: which tasks of an ended run a rerun starts over, and how many they are
(SPEC.md 4.18)."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from conveyor.domain import ingestion
from conveyor.domain.errors import Conflict
from conveyor.domain.lifecycle import TASK_TERMINAL, TASK_UNFINISHED
from conveyor.domain.model import FailureReason, RowsOf, Run, Task, TaskStatus
from conveyor.domain.totals import Totals
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import totals_of
from conveyor.usecases.walking import pages_of

EVERY_STATUS = frozenset(TaskStatus)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants to start over: tasks that all of these name; None names every task."""

    retry: frozenset[TaskStatus] | None = None
    reasons: frozenset[FailureReason] | None = None
    hosts: frozenset[str] | None = None

    @property
    def is_everything(self) -> bool:
        return self == Choice()

    def of(self, run: Run) -> RowsOf:
        retry = EVERY_STATUS if self.retry is None else self.retry
        return RowsOf(run_id=run.run_id, retry=retry, reasons=self.reasons, hosts=self.hosts)


class Chosen(msgspec.Struct):
    """How many tasks a choice names, and how many start over: what never finished does anyway."""

    named: int = 0
    restarted: int = 0


async def count_chosen(env: Env, run: Run, source: RowsOf) -> Chosen:
    """Exact. The counters know unless hosts are asked for; those are only in the rows."""
    if source.hosts is None:
        chosen = _counted(await totals_of(env, run), run, source)
    else:
        chosen = Chosen()
        async with aclosing(pages_of(env, run)) as pages:
            async for page in pages:
                for row in page:
                    count_row(chosen, row, source)
    if not chosen.named:
        raise Conflict("No task of the latest run matches the filter.", code="no_matching_tasks")
    return chosen


def count_row(chosen: Chosen, row: Task, source: RowsOf) -> bool:
    """Counts a row; answers whether it starts over."""
    is_named = ingestion.is_asked_for(row, source)
    is_restarted = is_named or row.status in TASK_UNFINISHED
    chosen.named += is_named
    chosen.restarted += is_restarted
    return is_restarted


def _counted(totals: Totals, run: Run, source: RowsOf) -> Chosen:
    """An ended run's unfinished tasks are all pending, whatever their rows say."""
    unfinished = run.total - totals.done
    counts = {
        TaskStatus.SUCCESSFUL: totals.successful,
        TaskStatus.FAILED: totals.failed,
        TaskStatus.PENDING: unfinished,
    }
    if source.reasons is not None:
        counts = {TaskStatus.FAILED: sum(totals.reasons.get(each, 0) for each in source.reasons)}
    named = {status: counts.get(status, 0) for status in source.retry}
    ended = sum(count for status, count in named.items() if status in TASK_TERMINAL)
    return Chosen(named=sum(named.values()), restarted=ended + unfinished)
