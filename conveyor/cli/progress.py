"""Progress: a live bar with rate and time left on a terminal, now and then a line elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

PLAIN_STEP = 0.1

Report = Callable[[int, int, int], None]


class RateColumn(ProgressColumn):
    """Pages a second, over the last while."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="cyan")


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Report]:
    """Yields `report(completed, failed, total)`."""
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
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=8) as bar:
        task_id = bar.add_task(title, total=total, failed="")

        def report(completed: int, failed: int, total: int) -> None:
            shown = f"{failed:,} failed" if failed else ""
            bar.update(task_id, completed=completed, total=total, failed=shown)

        yield report


def _plain(console: Console, title: str) -> Report:
    shown = -PLAIN_STEP

    def report(completed: int, failed: int, total: int) -> None:
        nonlocal shown
        share = completed / total if total else 1.0
        if share - shown >= PLAIN_STEP or (share == 1.0 and shown < 1.0):
            shown = share
            console.print(f"{title}: {completed:,} of {total:,} done, {failed:,} failed")

    return report
