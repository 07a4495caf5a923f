"""The program as a process, and servers for it to talk to; waiting has a deadline, always."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. `err` never holds a traceback: that is checked for every one."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@dataclass(frozen=True, slots=True)
class Program:
    """`conveyor` in a folder of its own, with settings of its own."""

    folder: Path
    settings: Mapping[str, str]

    def run(self, *args: str, stdin: str = "", **settings: str) -> Ended:
        """Runs it to its end."""
        with self.start(*args, **settings) as process:
            return finish(process, stdin)

    @contextmanager
    def start(self, *args: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [CONVEYOR, *args],
            cwd=self.folder,
            env=self._environ(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def _environ(self, settings: Mapping[str, str]) -> dict[str, str]:
        environ = {name: text for name, text in os.environ.items() if "CONVEYOR" not in name}
        return {**environ, **self.settings, **settings}

    def write(self, name: str, *lines: str) -> str:
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))
        return name


def finish(process: subprocess.Popen[str], stdin: str | None = None) -> Ended:
    out, err = process.communicate(stdin, timeout=PATIENCE_S)
    assert "Traceback" not in err, err
    return Ended(process.returncode, out, err)


def wait_until(holds: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, "it did not happen"
        time.sleep(0.01)


def catches_sigterm(pid: int) -> bool:
    """Whether the program has installed its handlers: the interpreter has none for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@contextmanager
def dev_server(folder: Path, **settings: str) -> Iterator[str]:
    """`conveyor dev` on a free port; yields its URL and sees to it that it stops in peace."""
    program = Program(folder, {"CONVEYOR_PORT": "0", "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    log = folder / "dev.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [CONVEYOR, "dev"], cwd=folder, env=program._environ(settings), stderr=stderr
        )
    with process:
        try:
            wait_until(lambda: "listening on" in log.read_text() or process.poll() is not None)
            yield log.read_text().partition("listening on ")[2].split()[0]
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
    text = log.read_text()
    assert code == 0, text
    assert "Traceback" not in text, text
