"""Stories: what a client does with a server that may die at any moment, told to their end.

The client is the one that we ask customers to be: it retries with the same key until it is
answered. When the server has died, it is started again, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from conveyor.cli.demo_site import Site
from tests.e2e.programs import Server, until
from tests.e2e.receiver import Receiver

RETRIED = {409, 429, 503}
FLAKY, MISSING, CHUNK = 3, 7, 1_000
SMALL = (0, 1, 2, FLAKY, MISSING)


@dataclass(slots=True)
class Client:
    """Asks until it is answered; `deaths` tells how often the server had to be started again."""

    server: Server
    site: Site
    receiver: Receiver
    deaths: int = 0
    _keys: int = 0

    def post(self, path: str, body: object = None, *, expect: int | None = None) -> Any:
        """The same key for every try. `expect`: another refusal than "not now" is an answer."""
        self._keys += 1
        headers = {"Idempotency-Key": f"key-{self._keys}"}
        return self._answer("POST", path, expect, json=body, headers=headers)

    def get(self, path: str) -> Any:
        return self._answer("GET", path, None)

    def upload(self, url: str, content: bytes) -> None:
        path = "/" + url.split("/", 3)[3]
        self._answer("PUT", path, None, content=content)

    def download(self, url: str) -> bytes:
        """From wherever the server listens by now."""
        response = self._persist("GET", "/" + url.split("/", 3)[3])
        assert response.is_success, response.text
        return response.content

    def delete(self, path: str) -> None:
        """A repetition may find that it is gone already."""
        response = self._persist("DELETE", path)
        assert response.status_code in {202, 404}, response.text

    def finds_nothing(self, path: str) -> None:
        assert self._persist("GET", path).status_code == 404

    def submit(self, pages: Iterator[int] | range | tuple[int, ...], **more: Any) -> str:
        base = f"http://127.0.0.1:{self.site.port}/page"
        tasks = [{"url": f"{base}/{number}"} for number in pages]
        return str(self.post("/v1/jobs", {"tasks": tasks, **more})["job_id"])

    def ended(self, job_id: str) -> dict[str, Any]:
        def run() -> dict[str, Any] | None:
            run: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")["latest_run"]
            return run if run["terminal"] else None

        return until(f"the run of {job_id} to end", run, deadline_s=240)

    def completed(self, job_id: str, total: int) -> dict[str, Any]:
        run = self.ended(job_id)
        stats = run["stats"]
        assert run["status"] == "completed", run
        assert stats["total"] == stats["completed"] == total, run
        assert stats["successful"] + stats["failed"] == total, run
        return run

    def _answer(self, method: str, path: str, expect: int | None, **options: Any) -> Any:
        response = self._persist(method, path, expect, **options)
        assert response.is_success or response.status_code == expect, response.text
        return response.json() if response.content else None

    def _persist(
        self, method: str, path: str, expect: int | None = None, **options: Any
    ) -> httpx.Response:
        give_up_at = time.monotonic() + 180
        while time.monotonic() < give_up_at:
            if self.server.has_ended():
                self.deaths += 1
                self.server.start()
            try:
                response = self.server.call(method, path, **options)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if response.status_code not in RETRIED - {expect}:
                return response
            time.sleep(0.1)
        raise AssertionError(f"{method} {path} was not answered")


Story = Callable[[Client], None]


def small(client: Client) -> None:
    """A list that goes in at once, with a page to retry and one that is not there."""
    job_id = client.submit(SMALL)
    run = client.completed(job_id, len(SMALL))
    results = client.get(f"/v1/jobs/{job_id}/results")["results"]
    good = [each for each in results if each["status"] == "successful"]

    assert run["stats"]["failed"] == 1
    assert len(results) == len(SMALL)
    assert client.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit")["ok"]
    for each in good:
        assert client.get(f"/v1/jobs/{job_id}/tasks/{each['task_id']}/history")


def long(client: Client) -> None:
    """A list that is staged and ingested while the client waits."""
    client.completed(client.submit(range(CHUNK + 50), max_inflight=200), CHUNK + 50)


def uploaded(client: Client) -> None:
    """A list that was uploaded, two chunks of it, with lines that are none."""
    slot = client.post("/v1/job_inputs", {"format": "text"})
    good = client.site.urls(CHUNK + 20)
    client.upload(slot["upload"]["url"], "\n".join(["ftp://x", *good, "y"]).encode())
    body = {"file_input_id": slot["file_input_id"], "max_inflight": 200}
    job_id = client.post("/v1/jobs", body)["job_id"]
    client.completed(job_id, CHUNK + 22)


def opened(client: Client) -> None:
    """An open job: two lists, then closed."""
    job_id = client.post("/v1/jobs", {"status": "open"})["job_id"]
    for first in (0, 10):
        tasks = [{"url": url} for url in client.site.urls(first + 3)[first:]]
        client.post(f"/v1/jobs/{job_id}/tasks", {"tasks": tasks})
    client.post(f"/v1/jobs/{job_id}/close")
    client.completed(job_id, 6)


def stopped(client: Client) -> None:
    """Paused, resumed, stopped; then what was left over is run."""
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
    """All of it again, then what failed again."""
    job_id = client.submit(SMALL)
    client.completed(job_id, len(SMALL))
    client.post(f"/v1/jobs/{job_id}/rerun")
    client.completed(job_id, len(SMALL))
    client.post(f"/v1/jobs/{job_id}/rerun?status=failed")
    client.completed(job_id, len(SMALL))
    assert len(client.get(f"/v1/jobs/{job_id}/runs")["runs"]) == 3


def exported(client: Client) -> None:
    """An export, whole, of an ended run."""
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
    """A run of it, then all of it: at once nobody can see it any more."""
    job_id = client.submit(SMALL)
    run = client.completed(job_id, len(SMALL))
    client.post(f"/v1/jobs/{job_id}/rerun")
    client.completed(job_id, len(SMALL))
    client.delete(f"/v1/jobs/{job_id}/runs/{run['run_id']}")
    client.delete(f"/v1/jobs/{job_id}")
    client.finds_nothing(f"/v1/jobs/{job_id}")


def told(client: Client) -> None:
    """A signed webhook; however often it is sent, it is one event."""
    client.post("/v1/hmac/keys/rotate")
    job_id = client.submit(SMALL, webhook={"url": client.receiver.url, "signature": True})
    client.completed(job_id, len(SMALL))
    log = f"/v1/jobs/{job_id}/webhook/deliveries"

    def delivered() -> Any:
        events = client.get(log)["deliveries"]
        return [each for each in events if each["status"] == "delivered"] or None

    (event,) = until("the delivery", delivered, deadline_s=240)
    client.post(f"{log}/{event['event_id']}/redeliver")
    until("the event again", lambda: len(client.receiver.received) >= 2 or None)
    assert {each.headers["webhook-id"] for each in client.receiver.received} == {event["event_id"]}


STORIES: dict[str, Story] = {
    story.__name__: story
    for story in (small, long, uploaded, opened, stopped, rerun, exported, deleted, told)
}


@contextmanager
def a_program(data_dir: Path, **environ: str) -> Iterator[Server]:
    """`conveyor dev` with a crash switch for sites: on its first start only."""
    server = Server(data_dir, module="tests.chaos.sites")
    server.start(**environ)
    try:
        yield server
    finally:
        server.kill()
