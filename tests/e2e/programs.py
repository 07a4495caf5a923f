"""Starts the real program as a process, and a site for it to scrape."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import trio

from conveyor.cli.demo import Site, running_site
from tests.crash.injection import PROGRAM, VARIABLE

T = TypeVar("T")

PRODUCT = "conveyor.cli.main"
# Processes start slowly on a busy machine; a hanging test ends by its own timeout.
DEADLINE_S = 300.0
KEY = {"X-API-Key": "tests"}


def until(
    what: str,
    check: Callable[[], T | None],
    *,
    deadline_s: float = DEADLINE_S,
    every_s: float = 0.02,
) -> T:
    """Polls until the function returns a value other than None and False, and returns it."""
    give_up_at = time.monotonic() + deadline_s
    while time.monotonic() < give_up_at:
        value = check()
        if value is not None and value is not False:
            return value
        time.sleep(every_s)
    raise AssertionError(f"waited {deadline_s} s for {what}")


@contextmanager
def a_site() -> Iterator[Site]:
    """Runs the demo site in a separate thread."""
    ready: list[Site] = []
    tokens: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []
    is_up = threading.Event()

    async def serve() -> None:
        with trio.CancelScope() as scope:
            async with running_site() as site:
                ready.append(site)
                tokens.append((trio.lowlevel.current_trio_token(), scope))
                is_up.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    is_up.wait(10)
    try:
        yield ready[0]
    finally:
        token, scope = tokens[0]
        token.run_sync_soon(scope.cancel)
        thread.join()


class Process(Protocol):
    """A process of the program, started by Popen or forked."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


def spawn(module: str, arguments: Sequence[str], environ: dict[str, str], log: Path) -> Process:
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def program_for(environ: Mapping[str, str], module: str = PRODUCT) -> str:
    """Returns the module to run: the product, or the product with a crash switch."""
    return PROGRAM if module == PRODUCT and VARIABLE in environ else module


Launch = Callable[[str, Sequence[str], dict[str, str], Path], Process]


@dataclass(slots=True)
class Server:
    """A `conveyor dev` process on a data directory that outlives it."""

    data_dir: Path
    environ: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    module: str = PRODUCT
    launch: Launch = spawn
    process: Process | None = None
    url: str = ""

    def start(self, **more: str) -> None:
        """Starts the process. Returns when it listens or has ended."""
        log = self.data_dir.parent / "server.log"
        offset = log.stat().st_size if log.exists() else 0
        environ = {**os.environ, **self._environ(), **self.environ, **more}
        log.touch()
        self.process = self.launch(
            program_for(environ, self.module), ("dev", *self.arguments), environ, log
        )

        def listening() -> str | None:
            with log.open("rb") as file:
                file.seek(offset)
                match = re.search(rb"listening on (http://\S+)", file.read())
            if match is not None:
                return match.group(1).decode()
            return "" if self.has_ended() else None

        self.url = until("the server to listen", lambda: _not_empty(listening(), self))

    def _environ(self) -> dict[str, str]:
        return {
            "CONVEYOR_DATA_DIR": str(self.data_dir),
            "CONVEYOR_PORT": "0",
            "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1",
            "CONVEYOR_LOG": "json",
        }

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {**KEY, **options.pop("headers", {})}
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False) as client:
            return client.request(method, path, headers=headers, **options)

    def ended_run(self, job_id: str) -> dict[str, Any] | None:
        """Returns the job's latest run if it has ended, otherwise None."""
        run: dict[str, Any] = self.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
        return run if run["terminal"] else None


def _not_empty(address: str | None, server: Server) -> str | None:
    """Returns "ended" as the address of a server that ended before it listened."""
    return "ended" if address == "" and server.has_ended() else address


@contextmanager
def a_server(data_dir: Path, arguments: tuple[str, ...] = ()) -> Iterator[Server]:
    server = Server(data_dir, arguments=arguments)
    server.start()
    try:
        yield server
    finally:
        server.kill()
