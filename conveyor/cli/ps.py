"""`conveyor ps`: shows the supervision tree of the process that owns the data directory, or the
workers of a shared engine."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from actors.runtime import Node
from conveyor.bootstrap.runtime import SHARED_ENGINES, open_runtime
from conveyor.cli.progress import span
from conveyor.cli.scrape.folder import STATE_NAME
from conveyor.cli.shutdown import run_command
from conveyor.cli.snapshot import run_lines
from conveyor.config import Settings
from conveyor.domain.run.wait_reason import WorkerReport
from conveyor.process_status import NotRunning, RunLine, Snapshot, read_snapshot
from conveyor.usecases.run import run_progress

WATCH_S = 1.0
_STYLES = {"running": "green", "backing_off": "yellow", "overdue": "red", "failed": "red"}


@click.command()
@click.argument(
    "folder", required=False, type=click.Path(path_type=Path, file_okay=False), metavar="[FOLDER]"
)
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="The whole snapshot as JSON.")
@click.pass_obj
def ps(settings: Settings, folder: Path | None, watch: bool, as_json: bool) -> None:
    """Show what the process on this data directory, the workers of this table, or the scrape into
    FOLDER, are doing."""
    data_dir = settings.data_dir if folder is None else _data_dir_of(folder)
    is_fleet = settings.engine in SHARED_ENGINES and folder is None
    console = Console()
    is_first = True
    while is_first or watch:
        try:
            view = run_command(_load_fleet, settings) if is_fleet else read_snapshot(data_dir)
        except NotRunning as error:
            if is_first:
                raise click.ClickException(str(error)) from None
            click.echo("The process has ended.", err=True)
            return
        if watch and console.is_terminal:
            console.clear()
        if as_json:
            click.echo(msgspec.json.encode(view).decode())
        elif isinstance(view, Fleet):
            _show_fleet(view, console)
        else:
            _show(view, console)
        is_first = False
        if watch:
            time.sleep(WATCH_S)


def _data_dir_of(folder: Path) -> Path:
    """The state of a scrape is in its folder, or in the directory that --data-dir named."""
    inner = folder / STATE_NAME
    return inner if inner.is_dir() else folder


def _show(snapshot: Snapshot, console: Console) -> None:
    console.print(
        f"conveyor {snapshot.version}  {snapshot.role}  pid {snapshot.pid}  "
        f"{snapshot.inflight:,} of {snapshot.capacity:,} in flight",
        highlight=False,
    )
    console.print(make_tree(snapshot))
    if snapshot.runs:
        console.print(_runs(snapshot.runs))


class Fleet(msgspec.Struct, frozen=True):
    """The workers and the live runs of a shared engine."""

    workers: list[WorkerReport]
    runs: list[RunLine]


async def _load_fleet(settings: Settings) -> Fleet:
    async with open_runtime(settings, role="ps") as world:
        workers = await run_progress.live_workers(world.env)
        return Fleet(workers, await run_lines(world.env))


def _show_fleet(fleet: Fleet, console: Console) -> None:
    table = Table(box=None)
    for title in ("worker", "release", "in flight", "of", "state"):
        table.add_column(title, no_wrap=True)
    for worker in fleet.workers:
        state = "draining" if worker.draining else "running"
        # Workers of earlier releases report only their slots.
        cells = (worker.worker or "-", worker.release or "-", f"{worker.inflight:,}")
        table.add_row(*cells, f"{worker.capacity:,}", state)
    if fleet.workers:
        console.print(table)
    else:
        console.print("No worker is running.")
    if fleet.runs:
        console.print(_runs(fleet.runs))


def make_tree(snapshot: Snapshot) -> Tree:
    progress = {line.run_id: line for line in snapshot.runs}
    root = Tree(_label(snapshot.tree, progress))
    _grow(root, snapshot.tree, progress)
    return root


def _grow(branch: Tree, node: Node, progress: dict[str, RunLine]) -> None:
    for child in node.children:
        _grow(branch.add(_label(child, progress)), child, progress)


def _label(node: Node, progress: dict[str, RunLine]) -> str:
    style = _STYLES.get(node.state, "dim")
    words = [f"[bold]{escape(node.name)}[/bold]", f"[{style}]{node.state}[/{style}]"]
    if node.uptime_s is not None:
        words.append(f"up {span(node.uptime_s)}")
    if node.restarts:
        words.append(f"[yellow]{node.restarts} restarts[/yellow]")
    if node.mailbox_capacity is not None:
        words.append(f"mail {node.mailbox_depth}/{node.mailbox_capacity}")
    if (line := progress.get(node.name)) is not None:
        words.append(f"{line.completed:,} of {line.total:,} done")
    if node.last_error is not None:
        words.append(f"[red]{escape(node.last_error)}[/red]")
    return "  ".join(words)


def _runs(lines: list[RunLine]) -> Table:
    """Numbers first: at 80 columns, only what is last may be cut."""
    table = Table(box=None, pad_edge=False)
    for title in ("done", "of", "failed", "left", "run"):
        table.add_column(title, no_wrap=True, overflow="ignore")
    table.add_column("waits for", overflow="fold")
    for line in lines:
        table.add_row(
            f"{line.completed:,}",
            f"{line.total:,}",
            f"{line.failed:,}",
            "" if line.eta_s is None else span(line.eta_s),
            line.run_id,
            "" if line.waiting_on is None else f"{line.waiting_on}: {line.waiting_detail}",
        )
    return table
