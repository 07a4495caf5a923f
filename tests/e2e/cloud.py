"""A deployment on the AWS engine: `init`, an API and workers as processes, on local servers that
stand in for AWS."""

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
from tests.e2e.programs import KEY, program_for, until
from tests.servers import ACCESS_KEY, SECRET_KEY, Postgres

Process = subprocess.Popen[bytes]


@dataclass(slots=True)
class Cloud:
    """A deployment: its environment and its running processes."""

    environ: dict[str, str]
    folder: Path
    processes: list[Process] = field(default_factory=list)
    logs: dict[int, Path] = field(default_factory=dict)

    def run(self, *args: str) -> str:
        command = [sys.executable, "-m", "conveyor.cli.main", *args]
        ended = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def start(self, role: str, **more: str) -> Process:
        log = self.folder / f"{len(self.processes)}-{role}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", program_for(more), role],
                env={**self.environ, **more},
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.processes.append(process)
        self.logs[process.pid] = log
        return process

    def workers(self, count: int, **more: str) -> list[Process]:
        return [self.start("worker", **more) for _ in range(count)]

    def api(self, **more: str) -> str:
        return self.url_of(self.start("api", **more))

    def url_of(self, process: Process) -> str:
        """Returns the URL of an API process; empty if it ended before it listened."""

        def listening() -> tuple[str] | None:
            match = re.search(r"listening on (http://\S+)", self.log_of(process))
            if match is not None:
                return (match.group(1),)
            return None if process.poll() is None else ("",)

        (url,) = until("the API to listen", listening)
        return url

    def log_of(self, process: Process) -> str:
        return self.logs[process.pid].read_text()

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.processes.clear()


@contextmanager
def aws_deployment(
    request: pytest.FixtureRequest, folder: Path, *, redis: str | None = None, **more: str
) -> Iterator[Cloud]:
    """Runs a new deployment on the servers of this session. `redis` is the URL of its Redis, if it
    has one; `more` are other settings."""
    dynamodb, sqs, s3 = map(request.getfixturevalue, ("ministack", "localstack", "seaweed"))
    with aws_deployment_on(folder, dynamodb=dynamodb, sqs=sqs, s3=s3, redis=redis, **more) as cloud:
        yield cloud


@contextmanager
def aws_deployment_on(
    folder: Path, *, dynamodb: str, sqs: str, s3: str, redis: str | None = None, **more: str
) -> Iterator[Cloud]:
    """Runs a new deployment on servers at these URLs."""
    name = a_space()
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_DYNAMODB": dynamodb,
        "AWS_ENDPOINT_URL_SFN": dynamodb,
        "AWS_ENDPOINT_URL_SQS": sqs,
        "AWS_ENDPOINT_URL_S3": s3,
        "CONVEYOR_ENGINE": "aws",
        "CONVEYOR_TABLE": name,
        "CONVEYOR_BUCKET": name,
        "CONVEYOR_QUEUE_PREFIX": f"{name}-",
        "CONVEYOR_REDIS_URL": redis or "",
        "CONVEYOR_SECRET_KEY": "between processes",
        # A local server on a busy machine may take longer to answer than AWS does.
        "CONVEYOR_AWS_TIMEOUT_S": "60",
        "CONVEYOR_PORT": "0",
        "CONVEYOR_METRICS_PORT": "0",
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
        **more,
    }
    cloud = Cloud(environ, folder)
    cloud.run("init")
    try:
        yield cloud
    finally:
        cloud.end()


def on_postgres(database: Postgres) -> dict[str, str]:
    """Returns the settings of a deployment whose tasks are in this database."""
    return {"CONVEYOR_TASK_STORE": "postgres", "CONVEYOR_DATABASE_URL": database.url}


@contextmanager
def a_client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=KEY, timeout=60, trust_env=False) as client:
        yield client


def run_of(client: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    run: dict[str, Any] = answer.json()["latest_run"]
    return run


def ended_run(client: httpx.Client, job_id: str) -> dict[str, Any] | None:
    run = run_of(client, job_id)
    return run if run["terminal"] else None
