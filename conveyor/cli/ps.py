"""`conveyor ps`: shows the supervision tree of the process that owns the data directory."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from actors.runtime import Node
from conveyor.cli.progress import span
from conveyor.config import Settings
from conveyor.process_status import NotRunning, RunLine, Snapshot, read_snapshot

_STYLES = {"running": "green", "backing_off": "yellow", "overdue": "red", "failed": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The whole snapshot as JSON.")
@click.pass_obj
def ps(settings: Settings, as_json: bool) -> None:
    """Show what the process on this data directory is doing."""
    try:
        snapshot = read_snapshot(settings.data_dir)
    except NotRunning as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(msgspec.json.encode(snapshot).decode())
        return
    console = Console()
    console.print(
        f"conveyor {snapshot.version}  {snapshot.role}  pid {snapshot.pid}  "
        f"{snapshot.inflight:,} of {snapshot.capacity:,} in flight",
        highlight=False,
    )
    console.print(_tree(snapshot))
    if snapshot.runs:
        console.print(_runs(snapshot.runs))


def _tree(snapshot: Snapshot) -> Tree:
    progress = {line.run_id: line for line in snapshot.runs}
    root = Tree(_label(snapshot.tree, progress))
    _grow(root, snapshot.tree, progress)
    return root


def _grow(branch: Tree, node: Node, progress: dict[str, RunLine]) -> None:
    for child in node.children:
        _grow(branch.add(_label(child, progress)), child, progress)


def _label(node: Node, progress: dict[str, RunLine]) -> str:
    style = _STYLES.get(node.state, "dim")
    words = [f"[bold]{node.name}[/bold]", f"[{style}]{node.state}[/{style}]"]
    if node.uptime_s is not None:
        words.append(f"up {node.uptime_s:,.0f} s")
    if node.restarts:
        words.append(f"[yellow]{node.restarts} restarts[/yellow]")
    if node.mailbox_capacity is not None:
        words.append(f"mail {node.mailbox_depth}/{node.mailbox_capacity}")
    if (line := progress.get(node.name)) is not None:
        words.append(f"{line.completed:,} of {line.total:,} done")
    if node.last_error is not None:
        words.append(f"[red]{node.last_error}[/red]")
    return "  ".join(words)


def _runs(lines: list[RunLine]) -> Table:
    table = Table(box=None)
    for title in (
        "run",
        "job",
        "status",
        "done",
        "of",
        "successful",
        "failed",
        "left",
        "waits for",
    ):
        table.add_column(title, no_wrap=True)
    for line in lines:
        table.add_row(
            line.run_id,
            line.job_id,
            line.status,
            f"{line.completed:,}",
            f"{line.total:,}",
            f"{line.successful:,}",
            f"{line.failed:,}",
            "" if line.eta_s is None else span(line.eta_s),
            "" if line.waiting_on is None else f"{line.waiting_on}: {line.waiting_detail}",
        )
    return table
