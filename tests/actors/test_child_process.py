"""WorkerProcess: the actor ends with its process, and the process with its actor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from actors.child_process import ProcessEnded, WorkerProcess

# Like a worker, it ends when its standard input is closed.
_WORKER = "import pathlib, sys; sys.stdin.read(); pathlib.Path(sys.argv[1]).touch()"


def a_process(script: str, *arguments: str) -> WorkerProcess:
    command = (sys.executable, "-I", "-S", "-c", script, *arguments)
    return WorkerProcess(command=command, environ=os.environ)


async def test_a_process_that_ends_by_itself_is_a_crash() -> None:
    with pytest.raises(ProcessEnded, match="ended with 3"):
        await a_process("raise SystemExit(3)").run()


async def test_a_process_whose_standard_input_is_closed_ends_before_its_actor(
    tmp_path: Path,
) -> None:
    ended = tmp_path / "ended"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(a_process(_WORKER, str(ended)).run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert ended.exists()
