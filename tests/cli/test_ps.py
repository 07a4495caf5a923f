"""`conveyor ps` and `conveyor demo`: what runs, and something to see."""

from __future__ import annotations

import io
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.runtime import Node
from conveyor.cli.demo import Site, is_missing
from conveyor.cli.ps import make_tree
from conveyor.process_status import Snapshot
from tests.cli.program import Program, finish, wait_until

pytestmark = pytest.mark.slow


def nodes(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree, *(node for child in tree["children"] for node in nodes(child))]


def test_ps_says_that_nobody_is_there(program: Program) -> None:
    ended = program.run("ps")

    assert ended.code == 2
    assert "Nothing is running on .conveyor" in ended.err
    assert "conveyor dev" in ended.err


def test_an_error_with_brackets_is_shown_as_it_is() -> None:
    error = "ValueError: [/etc/hosts] is [not] a list"
    root = Node(
        name="service",
        kind="process",
        state="failed",
        restarts=3,
        mailbox_depth=None,
        mailbox_capacity=None,
        uptime_s=90_000.0,
        last_error=error,
        children=(),
    )
    snapshot = Snapshot(pid=1, role="dev", version="1", inflight=0, capacity=1, tree=root, runs=[])
    console = Console(width=120, file=io.StringIO())

    console.print(make_tree(snapshot))

    screen = console.file.getvalue()  # type: ignore[attr-defined]
    assert error in screen
    assert "up 25.0 h" in screen
    assert "3 restarts" in screen


def test_ps_shows_a_running_scrape(program: Program, site: Site) -> None:
    with _slow_scrape(program, site) as process:
        screen, as_json = program.run("ps", "out"), program.run("ps", "out", "--json")

        assert process.poll() is None
    assert (screen.code, as_json.code) == (0, 0)
    snapshot = json.loads(as_json.out)
    assert (snapshot["pid"], snapshot["role"]) == (process.pid, "scrape")
    (run,) = snapshot["runs"]
    assert (run["run_id"], run["total"]) == ("out", 400)
    assert "400" in screen.out


def test_a_watch_shows_a_scrape_again_until_ctrl_c(program: Program, site: Site) -> None:
    with _slow_scrape(program, site), program.start("ps", "out", "--watch", "--json") as watch:
        assert watch.stdout is not None
        snapshots = [json.loads(watch.stdout.readline()) for _ in range(2)]
        watch.send_signal(signal.SIGINT)
        ended = finish(watch)

    assert ended.code == 130
    assert [snapshot["role"] for snapshot in snapshots] == ["scrape", "scrape"]


def test_a_watch_ends_with_the_scrape(program: Program, site: Site) -> None:
    with _slow_scrape(program, site) as scrape, program.start("ps", "out", "--watch") as watch:
        assert watch.stdout is not None
        assert "scrape" in watch.stdout.readline()
        scrape.send_signal(signal.SIGINT)
        assert finish(scrape).code == 130
        ended = finish(watch)

    assert ended.code == 0
    assert "The process has ended" in ended.err


@contextmanager
def _slow_scrape(program: Program, site: Site) -> Iterator[subprocess.Popen[str]]:
    """A scrape that would take minutes, and can be asked by now."""
    program.write("list.txt", *site.urls(400))
    socket = program.folder / "out" / ".conveyor" / "ps.sock"
    with program.start("scrape", "list.txt", "--rate", "1", "-o", "out") as process:
        wait_until(lambda: socket.exists() or process.poll() is not None)
        yield process


def test_ps_shows_the_tree_of_a_running_service(server: str, server_folder: Path) -> None:
    program = Program(server_folder, {})

    screen, as_json = program.run("ps"), program.run("ps", "--json")

    assert (screen.code, as_json.code) == (0, 0)
    tree = nodes(json.loads(as_json.out)["tree"])
    assert {"runs", "inspection"} <= {node["name"] for node in tree}
    assert all(node["state"] == "running" for node in tree)


def test_the_demo_scrapes_its_own_site_and_checks_the_count(program: Program) -> None:
    missing = sum(map(is_missing, range(60)))

    ended = program.run("demo", "--pages", "60", "-o", "out", "--json")

    assert ended.code == 0
    summary = json.loads(ended.lines[-1])
    assert (summary["total"], summary["failed"]) == (60, missing)
    assert len(list((program.folder / "out").glob("*.html"))) == 60 - missing
