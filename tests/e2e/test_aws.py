"""The AWS engine as people run it: `init`, an API, workers, over servers that stand in for AWS."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.coordinators import a_space
from tests.e2e.programs import KEY, a_site, until
from tests.e2e.test_stop import a_silent_site
from tests.servers import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Cloud:
    """A deployment: its environment, and the processes of it that run."""

    environ: dict[str, str]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *args: str) -> str:
        command = [sys.executable, "-m", "conveyor.cli.main", *args]
        ended = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def start(self, *args: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f"{len(self.processes)}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "conveyor.cli.main", *args],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.processes.append(process)
        return process, log

    def api(self) -> str:
        return _told(r"listening on (http://\S+)", *self.start("api"))


def _told(what: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """What a process says of itself in its log."""

    def said() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(what, log.read_text())
        return None if found is None else found.group(1)

    return until(what, said)


@pytest.fixture(params=["with Redis", "without Redis"])
def cloud(
    request: pytest.FixtureRequest,
    ministack: str,
    localstack: str,
    seaweed: str,
    redis: str,
    tmp_path: Path,
) -> Iterator[Cloud]:
    name = a_space()
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_DYNAMODB": ministack,
        "AWS_ENDPOINT_URL_SQS": localstack,
        "AWS_ENDPOINT_URL_S3": seaweed,
        "CONVEYOR_ENGINE": "aws",
        "CONVEYOR_TABLE": name,
        "CONVEYOR_BUCKET": name,
        "CONVEYOR_QUEUE_PREFIX": f"{name}-",
        "CONVEYOR_REDIS_URL": redis if request.param == "with Redis" else "",
        "CONVEYOR_SECRET_KEY": "between processes",
        "CONVEYOR_PORT": "0",
        "CONVEYOR_METRICS_PORT": "0",
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
    }
    cloud = Cloud(environ, tmp_path)
    try:
        yield cloud
    finally:
        for process in cloud.processes:
            process.kill()
            process.wait()


@contextmanager
def _client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=KEY, timeout=60, trust_env=False) as client:
        yield client


def _run_of(client: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    run: dict[str, Any] = answer.json()["latest_run"]
    return run


def test_a_job_is_done_by_workers_in_other_processes_and_they_end_when_asked(cloud: Cloud) -> None:
    first, again = cloud.run("init"), cloud.run("init")
    with a_site() as site, _client(cloud.api()) as client:
        started = [cloud.start("worker") for _ in range(2)]
        workers = [process for process, _ in started]
        tasks = [{"url": url} for url in site.urls(120)]

        submitted = client.post("/v1/jobs", json={"tasks": tasks})
        assert submitted.status_code == 201, submitted.text
        job_id = submitted.json()["job_id"]
        run = until(
            "the run to complete",
            lambda: run if (run := _run_of(client, job_id))["status"] == "completed" else None,
        )
        shown = [
            httpx.get(_told(r"(http://[^\s\"]+/metrics)", *each), trust_env=False).text
            for each in started
        ]
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(timeout=60) for worker in workers]

    assert first == again
    assert (run["stats"]["completed"], run["stats"]["total"]) == (120, 120)
    assert codes == [0, 0]
    assert all("conveyor_engine_calls_total{" in each for each in shown)


@pytest.mark.parametrize("cloud", ["with Redis"], indirect=True)
def test_a_stop_reaches_workers_in_other_processes_at_once(cloud: Cloud) -> None:
    cloud.run("init")
    with a_silent_site() as port, _client(cloud.api()) as client:
        for _ in range(2):
            cloud.start("worker")
        tasks = [{"url": f"http://127.0.0.1:{port}/{number}"} for number in range(40)]
        job_id = client.post("/v1/jobs", json={"tasks": tasks}).json()["job_id"]
        until("work in flight", lambda: _run_of(client, job_id)["stats"]["inflight"] == 40 or None)

        stopped = client.post(f"/v1/jobs/{job_id}/stop").json()

    assert stopped["receipt"]["leases"] == 0
    assert stopped["receipt"]["released"] >= 40
    assert stopped["status"] == "stopped"
