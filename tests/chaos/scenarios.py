"""The stories of the kill matrix: what a client does with a server that may die at any moment.

Stories of rare requests are in `rare_scenarios.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import rare_scenarios
from tests.chaos.client import Client
from tests.chaos.processes import fork
from tests.e2e.programs import Server, until

GATEWAY = "http://127.0.0.1:{port}/page/1"  # The site answers as a gateway.
FLAKY, MISSING, CHUNK = 3, 7, 1_000
SMALL = (0, 1, 2, FLAKY, MISSING)


@dataclass(frozen=True, slots=True)
class Story:
    """A story and its options. The server dies `first_deaths` times before the requested death.
    `environ` may refer to the `{port}` of the site."""

    run: Callable[[Client], None]
    jobs_count: int = 1
    first_deaths: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


def small(client: Client) -> None:
    """A short list has a page that must be retried and one that does not exist."""
    job_id = client.submit(SMALL)
    run = client.completed(job_id, len(SMALL))
    results = client.get(f"/v1/jobs/{job_id}/results")["results"]
    good = [result for result in results if result["status"] == "successful"]

    assert run["stats"]["failed"] == 1
    assert len(results) == len(SMALL)
    assert client.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit")["ok"]
    for answer in good:
        assert client.get(f"/v1/jobs/{job_id}/tasks/{answer['task_id']}/history")


def long(client: Client) -> None:
    """A long list is staged, and ingested while the client waits."""
    client.completed(client.submit(range(CHUNK + 50), max_inflight=200), CHUNK + 50)


def uploaded(client: Client) -> None:
    """An uploaded list has two chunks and two invalid lines."""
    slot = client.post("/v1/job_inputs", {"format": "text"})
    good = client.site.urls(CHUNK + 20)
    client.upload(slot["upload"]["url"], "\n".join(["ftp://x", *good, "y"]).encode())
    body = {"file_input_id": slot["file_input_id"], "max_inflight": 200}
    job_id = client.post("/v1/jobs", body)["job_id"]
    client.completed(job_id, CHUNK + 22)


def opened(client: Client) -> None:
    """An open job gets two lists and is closed."""
    job_id = client.post("/v1/jobs", {"status": "open"})["job_id"]
    for first in (0, 10):
        tasks = [{"url": url} for url in client.site.urls(first + 3)[first:]]
        client.post(f"/v1/jobs/{job_id}/tasks", {"tasks": tasks})
    client.post(f"/v1/jobs/{job_id}/close")
    client.completed(job_id, 6)


def stopped(client: Client) -> None:
    """A run is paused, resumed and stopped; then its remaining tasks are rerun."""
    job_id = client.submit(range(60), max_inflight=2)
    for verb in ("pause", "resume", "stop"):
        client.post(f"/v1/jobs/{job_id}/{verb}", expect=409)
    run = client.ended(job_id)
    left = run["stats"]["total"] - run["stats"]["completed"]
    assert run["status"] == "stopped"

    client.post(f"/v1/jobs/{job_id}/rerun?status=pending,processing")
    again = client.completed(job_id, 60)
    assert left > 0
    assert again["run_id"] != run["run_id"]


def rerun(client: Client) -> None:
    """A job is rerun, then only its failed tasks."""
    job_id = client.submit(SMALL)
    client.completed(job_id, len(SMALL))
    client.post(f"/v1/jobs/{job_id}/rerun")
    client.completed(job_id, len(SMALL))
    client.post(f"/v1/jobs/{job_id}/rerun?status=failed")
    client.completed(job_id, len(SMALL))
    assert len(client.get(f"/v1/jobs/{job_id}/runs")["runs"]) == 3


def exported(client: Client) -> None:
    """An ended run is exported and the export downloaded."""
    job_id = client.submit(SMALL)
    run = client.completed(job_id, len(SMALL))
    exports = f"/v1/jobs/{job_id}/runs/{run['run_id']}/exports"
    export_id = client.post(f"{exports}?format=jsonl")["export_id"]

    def made() -> Any:
        export = client.get(f"{exports}/{export_id}")
        return export if export["status"] == "completed" else None

    export = until("the export", made, deadline_s=120)
    content = client.download(export["download_url"])
    assert len(content.splitlines()) >= len(SMALL)


def deleted(client: Client) -> None:
    """A run is deleted, then its job; the job is invisible immediately."""
    job_id = client.submit(SMALL)
    run = client.completed(job_id, len(SMALL))
    client.post(f"/v1/jobs/{job_id}/rerun")
    client.completed(job_id, len(SMALL))
    client.delete(f"/v1/jobs/{job_id}/runs/{run['run_id']}")
    client.delete(f"/v1/jobs/{job_id}")
    client.finds_nothing(f"/v1/jobs/{job_id}")


def told(client: Client) -> None:
    """A signed webhook is delivered and redelivered with the same event id."""
    client.post("/v1/hmac/keys/rotate")
    job_id = client.submit(SMALL, webhook={"url": client.receiver.url, "signature": True})
    client.completed(job_id, len(SMALL))
    log = f"/v1/jobs/{job_id}/webhook/deliveries"

    def delivered() -> Any:
        events = client.get(log)["deliveries"]
        return [event for event in events if event["status"] == "delivered"] or None

    (event,) = until("the delivery", delivered, deadline_s=240)
    client.post(f"{log}/{event['event_id']}/redeliver")
    until("the event again", lambda: len(client.receiver.received) >= 2 or None)
    assert {delivery.headers["webhook-id"] for delivery in client.receiver.received} == {
        event["event_id"]
    }


STORIES = {
    "small": Story(small),
    "long": Story(long),
    "uploaded": Story(uploaded),
    "opened": Story(opened),
    "stopped": Story(stopped),
    "rerun": Story(rerun),
    "exported": Story(exported),
    "deleted": Story(deleted, jobs_count=0),
    "told": Story(told),
    "scheduled": Story(rare_scenarios.scheduled),
    "streamed": Story(rare_scenarios.streamed),
    "hooked": Story(rare_scenarios.hooked),
    "capped": Story(rare_scenarios.capped, environ={"CONVEYOR_GATEWAY_URL": GATEWAY}),
    "limited": Story(rare_scenarios.limited),
    "drained": Story(rare_scenarios.drained),
    "looked at": Story(rare_scenarios.looked_at),
    "scrubbed": Story(rare_scenarios.scrubbed, jobs_count=0),
    "cut short": Story(rare_scenarios.cut_short, jobs_count=0),
    "slow": Story(rare_scenarios.slow),
    "resumed": Story(small, first_deaths=("after:store.commit@usecases.submit.jobs._admit",)),
    "answered": Story(
        small, first_deaths=("before:store.commit@usecases.idempotency._store_response",)
    ),
    "ingested": Story(
        long, first_deaths=("after:store.put_chunk@usecases.run.ingest._put_chunks.put",)
    ),
    "acked": Story(
        small,
        first_deaths=("before:queue.ack@actors.shard_writer.ShardWriter._complete_and_ack",),
    ),
    "added": Story(opened, first_deaths=("after:store.commit@usecases.submit.jobs._admit",)),
    "ended": Story(small, first_deaths=("after:store.commit@usecases.run.runs.complete_if_done",)),
    "halted": Story(stopped, first_deaths=("after:store.commit@usecases.run.runs.stop",)),
    "rerun again": Story(rerun, first_deaths=("after:store.commit@usecases.run.rerun._start",)),
    "walked": Story(exported, first_deaths=("after:blobs.put_stream@usecases.export._make",)),
    "retold": Story(told, first_deaths=("before:store.commit@usecases.webhook.deliver",)),
    "removed": Story(
        rare_scenarios.scrubbed,
        jobs_count=0,
        first_deaths=("after:store.commit@usecases.submit.jobs.delete",),
    ),
}


@contextmanager
def running_program(data_dir: Path, environ: dict[str, str], crash_at: str) -> Iterator[Server]:
    """Runs `conveyor dev`, which crashes at the site `crash_at` in its first life."""
    server = Server(data_dir, environ, module="tests.chaos.site_program", launch=fork)
    server.start(TEST_CRASH_AT=crash_at)
    try:
        yield server
    finally:
        server.kill()
