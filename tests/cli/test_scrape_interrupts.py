"""Ctrl-C while a scrape reads its list and while it writes pages, and folders that take no page."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest
import trio

from conveyor.cli.demo import Site
from conveyor.cli.scrape.folder import FORMAT_VERSION, CannotWrite, Folder, FolderState
from conveyor.cli.scrape.helpers import HelperSide, fork_helper
from conveyor.cli.scrape.options import ScrapeOptions
from conveyor.cli.scrape.pages import Page
from tests.cli.program import CONVEYOR, Program, catches_sigterm, finish, wait_until

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


def test_a_page_that_cannot_be_written_ends_the_command(
    program: Program, tmp_path: Path, site: Site
) -> None:
    program.write("list.txt", *site.urls(200))
    for number in range(200):
        (tmp_path / f"out/{number:06d}.html").mkdir(parents=True)

    ended = program.run("scrape", "list.txt", "-o", "out", "--processes", "2")

    assert ended.code == 2
    assert ended.err.splitlines()[-1] == "Error: Cannot write to out: Is a directory."


def test_a_helper_that_cannot_write_leaves_the_message_to_the_first_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def work(_: HelperSide) -> None:
        async with trio.open_nursery():
            raise CannotWrite("Cannot write to out: No space left on device.")

    helper = fork_helper(work)
    os.wait()
    helper.stop()

    assert capfd.readouterr().err == ""


def test_a_folder_that_can_hold_no_socket_is_no_reason_to_stop(
    program: Program, tmp_path: Path, site: Site
) -> None:
    """Some file systems have no sockets. Only `conveyor ps` needs one."""
    (tmp_path / "out/.conveyor/ps.sock").mkdir(parents=True)

    ended = program.run("scrape", *site.urls(3), "-o", "out", "--rate", "1")

    assert (ended.code, ended.err.count("3 successful")) == (0, 1)


def test_a_command_whose_streams_are_closed_works(tmp_path: Path, site: Site) -> None:
    command = f"{CONVEYOR} scrape {site.urls(1)[0]} -o out <&- >&- 2>&-"
    environ = {**os.environ, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"}

    ended = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=environ, check=False)

    assert ended.returncode == 0
    assert (tmp_path / "out/results.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "out/.conveyor/lock").read_text().strip().isdigit()


def test_a_folder_whose_permissions_cannot_change_takes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FAT file system has no permissions, and refuses to change them."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    folder = Folder(tmp_path / "out")
    folder.open()
    folder.begin([Page("https://a.example/")], a_state(folder))
    folder.close()

    assert (tmp_path / "out/.conveyor/list.jsonl").exists()


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(CannotWrite, match="No locks available"):
        Folder(tmp_path / "out").open()


def a_state(folder: Folder) -> FolderState:
    return FolderState(FORMAT_VERSION, str(folder.path), "list.txt", [], ScrapeOptions())
