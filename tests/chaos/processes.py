"""Forks processes from one that has imported the sources, so that hundreds start in little time.

Each process has its own memory and signals, and can be killed like any other.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Lock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["tests.chaos.site_program", "conveyor.cli.roles", "conveyor.cli.roles"]
)
_STARTING = Lock()


@dataclass(frozen=True, slots=True)
class Forked:
    process: ForkServerProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        code = self.process.exitcode
        assert code is not None, f"process {self.pid} does not end"
        return code

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)


def fork(module: str, arguments: Sequence[str], environ: dict[str, str], log: Path) -> Forked:
    process = _CONTEXT.Process(target=_run, args=(module, arguments, environ, log), daemon=True)
    with _STARTING:
        process.start()
    return Forked(process)


def _run(module: str, arguments: Sequence[str], environ: dict[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with log.open("ab") as stderr:
        os.dup2(stderr.fileno(), 2)
    sys.argv = [module, *arguments]
    importlib.import_module(module).run()
