"""Progress: a live bar with rate and remaining time on a terminal, otherwise a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from conveyor.domain.run.wait_reason import WaitReason

# Without a terminal, one line for each tenth of the run, so that logs stay short.
PLAIN_STEP = 0.1

# A run that is as busy as its limits allow needs no explanation.
_ORDINARY = frozenset({WaitReason.JOB_CAP, WaitReason.WORKERS_BUSY})


class Report(Protocol):
    """Shows the progress of a run. `note` is the reason why it waits, if it does."""

    def __call__(self, completed: int, failed: int, total: int, note: str = "") -> None: ...


def note_of(reason: WaitReason, detail: str) -> str:
    """Returns the note for the progress display; empty for an ordinary reason."""
    return "" if reason in _ORDINARY else detail


def span(seconds: float) -> str:
    """Formats a duration for people."""
    if seconds < 90:
        return f"{seconds:,.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


class RateColumn(ProgressColumn):
    """The recent rate in pages a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="cyan")


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Report]:
    """Yields the function that the caller calls whenever the progress may have changed."""
    if not console.is_terminal:
        yield _plain(console, title)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TextColumn("[red]{task.fields[failed]}"),
        TextColumn("{task.fields[note]}", style="yellow", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=8) as bar:
        task_id = bar.add_task(title, total=total, failed="", note="")

        def report(completed: int, failed: int, total: int, note: str = "") -> None:
            failures = f"{failed:,} failed" if failed else ""
            bar.update(task_id, completed=completed, total=total, failed=failures, note=note)

        yield report


def _plain(console: Console, title: str) -> Report:
    printed_share, noted = -PLAIN_STEP, ""

    def report(completed: int, failed: int, total: int, note: str = "") -> None:
        nonlocal printed_share, noted
        share = completed / total if total else 1.0
        cause = note.partition(";")[0]
        if cause and cause != noted:
            console.print(f"{title}: {note}", markup=False)
        noted = cause or noted
        if share - printed_share >= PLAIN_STEP or (share == 1.0 and printed_share < 1.0):
            printed_share = share
            console.print(f"{title}: {completed:,} of {total:,} done, {failed:,} failed")

    return report
