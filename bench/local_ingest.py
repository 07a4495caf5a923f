"""Measures how long a deployment on local servers takes to accept and ingest a list.

One API process and two worker processes run on servers that stand in for DynamoDB, SQS, S3 and
Redis. The workers fetch pages of a local site meanwhile. Times are measured by the client: until
the response to the submit, and until the run reports that its whole list is ingested.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec

from tests.e2e.programs import KEY, a_site, until
from tests.servers import (
    ACCESS_KEY,
    SECRET_KEY,
    a_localstack,
    a_ministack,
    a_redis,
    a_seaweed,
)

SIZES = (9_999, 12_000)
WORKERS = 2


class Ingested(msgspec.Struct, frozen=True):
    """`status` is 201 if the list was ingested before the response, otherwise 202."""

    tasks: int
    status: int
    answer_s: float
    ingested_s: float
    done_by_then: int


@contextmanager
def running_deployment(folder: Path) -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        ministack = stack.enter_context(a_ministack(folder / "ministack"))
        redis = stack.enter_context(a_redis(folder / "redis"))
        environ = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_DYNAMODB": ministack,
            "AWS_ENDPOINT_URL_SFN": ministack,
            "AWS_ENDPOINT_URL_SQS": stack.enter_context(a_localstack(folder / "sqs")),
            "AWS_ENDPOINT_URL_S3": stack.enter_context(a_seaweed(folder / "s3")),
            "CONVEYOR_ENGINE": "aws",
            "CONVEYOR_TABLE": "bench",
            "CONVEYOR_BUCKET": "bench",
            "CONVEYOR_QUEUE_PREFIX": "bench-",
            "CONVEYOR_REDIS_URL": redis,
            "CONVEYOR_SECRET_KEY": "of the bench",
            "CONVEYOR_PORT": "0",
            "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
        }
        subprocess.run([*_COMMAND, "init"], env=environ, check=True, stdout=subprocess.DEVNULL)
        log = folder / "api.log"
        _start(stack, "api", environ, log)
        for number in range(WORKERS):
            _start(stack, "worker", environ, folder / f"worker-{number}.log")
        address = until("the API", lambda: re.search(r"listening on (\S+)", log.read_text()))
        yield stack.enter_context(
            httpx.Client(base_url=address[1], headers=KEY, timeout=300, trust_env=False)
        )


_COMMAND = [sys.executable, "-m", "conveyor.cli.main"]


def _start(stack: ExitStack, role: str, environ: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as stderr:
        process = subprocess.Popen([*_COMMAND, role], env=environ, stderr=stderr)

    def end() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    stack.callback(end)


def measure(client: httpx.Client, urls: Sequence[str]) -> Ingested:
    started_at = time.monotonic()
    answer = client.post("/v1/jobs", json={"tasks": [{"url": url} for url in urls]})
    answer_s = time.monotonic() - started_at
    assert answer.status_code in {201, 202}, answer.text
    job_id = answer.json()["job_id"]

    def ingested() -> int | None:
        job = client.get(f"/v1/jobs/{job_id}").json()
        run = job["latest_run"]
        is_whole = run.get("ingest_status", "done") == "done"
        return run["stats"]["completed"] if is_whole else None

    done = until("the list to be ingested", ingested, every_s=0.25)
    ingested_s = time.monotonic() - started_at
    client.post(f"/v1/jobs/{job_id}/stop")
    return Ingested(len(urls), answer.status_code, answer_s, ingested_s, done)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench local_ingest", description=__doc__)
    parser.add_argument("--tasks", type=int, help="measure one list of this length instead of two")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder,
        a_site() as site,
        running_deployment(Path(folder).resolve()) as client,
    ):
        for size in SIZES if options.tasks is None else (options.tasks,):
            measured = measure(client, list(site.urls(size)))
            print(
                f"{size:,} tasks: {measured.status} after {measured.answer_s:.1f} s, all ingested "
                f"after {measured.ingested_s:.1f} s and {measured.done_by_then:,} fetched by then",
                flush=True,
            )
            if options.json:
                print(msgspec.json.encode(measured).decode(), flush=True)
