"""WorkerProcess: keeps one more process at work on the same data (docs/operations.md, Roles).

Owns:    the process, from its start to its end.
Hears:   nothing.
Says:    nothing; the two processes meet in the engine alone.
Crashes: when the process ends by itself or is killed, so that its supervisor starts another.
         Whatever it had in hand lapses; nothing is lost.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from actors.runtime import bounded_cleanup

STOP_S = 8.0


class ProcessEnded(Exception):
    """The process ended although nobody asked it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    command: Sequence[str]
    environ: Mapping[str, str]

    async def run(self) -> None:
        # It reads its standard input to know that we live: when we are gone, however, it goes.
        process = await trio.lowlevel.open_process(
            self.command, env=dict(self.environ), stdin=subprocess.PIPE
        )
        try:
            code = await process.wait()
            raise ProcessEnded(f"worker process {process.pid} ended with {code}")
        finally:
            with bounded_cleanup(STOP_S):
                await _end(process)


async def _end(process: trio.Process) -> None:
    """Asks it to end by closing its input, and kills it if it does not."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with trio.move_on_after(STOP_S - 2.0):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
