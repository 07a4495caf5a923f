"""Ctrl-C while a scrape reads its list, and while it writes pages."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from conveyor.cli.demo import Site
from tests.cli.program import Program, catches_sigterm, finish, wait_until

pytestmark = pytest.mark.slow


def test_ctrl_c_while_the_list_is_read_ends_the_command(program: Program) -> None:
    with program.start("scrape", "-", "-o", "out") as process:
        assert process.stdin is not None
        process.stdin.write("https://a.example/\n")
        process.stdin.flush()
        wait_until(lambda: catches_sigterm(process.pid))
        process.send_signal(signal.SIGINT)
        ended = finish(process)

    assert ended.code == 130
    assert ended.err == "Interrupted.\n"


def test_ctrl_c_while_pages_are_written_ends_the_command(
    program: Program, tmp_path: Path, site: Site
) -> None:
    program.write("list.txt", *site.urls(3_000))
    with program.start("scrape", "list.txt", "-o", "out", "--processes", "2") as process:
        wait_until(lambda: list((tmp_path / "out").glob("*.html")) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        ended = finish(process)

    assert ended.code == 130
    assert "The same command goes on from there." in ended.err
