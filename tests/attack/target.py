"""The program under attack, started as users start it, and a client of its API."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 60.0
HEALTH_S = 60.0


@dataclass(slots=True)
class Target:
    """A `conveyor dev` process with its own data directory."""

    python: str
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    url: str = ""

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = {
            **{name: value for name, value in os.environ.items() if "CONVEYOR" not in name},
            "CONVEYOR_DATA_DIR": str(self.data_dir),
            "CONVEYOR_PORT": "0",
            "CONVEYOR_LOG": "json",
            **self.environ,
        }
        program = (self.python, "-P", "-m", "conveyor.cli.main", "dev", *self.arguments)
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*self.prefix, *program],
                env=environ,
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        give_up_at = time.monotonic() + START_S
        while time.monotonic() < give_up_at and self.process.poll() is None:
            match = re.search(rb"listening on (http://[^\s\"]+)", self.log.read_bytes()[offset:])
            if match is not None:
                self.url = match.group(1).decode()
                return
            time.sleep(0.02)
        raise AssertionError(f"the server did not start: {self.log.read_text()[-2000:]}")

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)
        self.process = None

    def terminate(self, deadline_s: float) -> float | None:
        """Sends SIGTERM. Returns the seconds until the process ended; None after the deadline."""
        assert self.process is not None
        started_at = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - started_at

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def call(self, method: str, path: str, key: str = "victim", **options: Any) -> httpx.Response:
        headers = {"X-API-Key": key, **options.pop("headers", {})}
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False, verify=False) as client:
            return client.request(method, path, headers=headers, **options)

    def submit(self, urls: Sequence[str], key: str = "victim", **more: Any) -> str:
        """Submits a job and returns its id."""
        params = more.pop("zenrows_params", None)
        tasks = [{"url": url} | ({"zenrows_params": params} if params else {}) for url in urls]
        answer = self.call("POST", "/v1/jobs", key, json={"tasks": tasks, **more})
        assert answer.status_code in (201, 202), answer.text
        job_id: str = answer.json()["job_id"]
        return job_id

    def run_of(self, job_id: str, key: str = "victim") -> dict[str, Any]:
        run: dict[str, Any] = self.call("GET", f"/v1/jobs/{job_id}", key).json()["latest_run"]
        return run

    def wait_ended(
        self, job_id: str, key: str = "victim", deadline_s: float = 60.0
    ) -> float | None:
        """Returns the seconds until the job's run has ended; None after the deadline."""
        started_at = time.monotonic()
        while time.monotonic() - started_at < deadline_s:
            if self.run_of(job_id, key)["terminal"]:
                return time.monotonic() - started_at
            time.sleep(0.05)
        return None

    def bodies_of(self, job_id: str, key: str = "victim") -> dict[str, str]:
        """Returns the stored bodies by URL."""
        bodies: dict[str, str] = {}
        cursor = ""
        while True:
            path = f"/v1/jobs/{job_id}/results?limit=100" + (f"&cursor={cursor}" if cursor else "")
            page = self.call("GET", path, key).json()
            for result in page["results"]:
                if result["status"] == "successful":
                    link = result["result_url"].partition("/v1/")[2]
                    bodies[result["url"]] = self.call("GET", f"/v1/{link}", key).text
            cursor = page.get("next_cursor")
            if not cursor:
                return bodies

    def slowest_health_s(self, seconds: float) -> float:
        """Repeats health checks for `seconds`, and returns the time of the slowest one."""
        slowest, ends_at = 0.0, time.monotonic() + seconds
        with httpx.Client(base_url=self.url, timeout=HEALTH_S, trust_env=False) as client:
            while time.monotonic() < ends_at:
                started_at = time.monotonic()
                client.get("/healthz")
                slowest = max(slowest, time.monotonic() - started_at)
                time.sleep(0.02)
        return slowest

    def cpu_s(self) -> float:
        """Returns the CPU seconds that the process has used."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def disk_bytes(self) -> int:
        return sum(
            file.stat().st_blocks * 512 for file in self.data_dir.rglob("*") if file.is_file()
        )

    def log_lines(self) -> list[dict[str, Any]]:
        lines = self.log.read_bytes().splitlines()
        return [json.loads(line) for line in lines if line.startswith(b"{")]


@contextmanager
def running(target: Target) -> Iterator[Target]:
    target.start()
    try:
        yield target
    finally:
        target.end()
