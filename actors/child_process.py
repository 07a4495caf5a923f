"""WorkerProcess: keeps one more process running on the same data (docs/operations.md, Roles).

Owns:    the process, from its start to its end.
Hears:   nothing.
Says:    nothing; the two processes share only the engine.
Crashes: when the process ends by itself or is killed, so that its supervisor starts another. Its
         leases and claims lapse; nothing is lost.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from actors.runtime import bounded_cleanup

# How long a process has to stop, of which the last 2 s are for the kill. Its pollers need up to
# POLLER_GRACE_S (5 s) of it.
STOP_S = 8.0


class ProcessEnded(Exception):
    """The process ended without a request to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    command: Sequence[str]
    environ: Mapping[str, str]
    pass_fds: Sequence[int] = ()

    async def run(self) -> None:
        # The process reads its standard input. When this process ends in any way, the pipe closes
        # and the other process ends too.
        process = await trio.lowlevel.open_process(
            self.command,
            env=dict(self.environ),
            stdin=subprocess.PIPE,
            pass_fds=self.pass_fds,
        )
        try:
            code = await process.wait()
            raise ProcessEnded(f"worker process {process.pid} ended with {code}")
        finally:
            with bounded_cleanup(STOP_S):
                await _end(process)


async def _end(process: trio.Process) -> None:
    """Requests the end by closing the standard input, and kills the process if it does not end in
    time."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with trio.move_on_after(STOP_S - 2.0):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
