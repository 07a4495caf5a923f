"""Stories of the kill matrix for rare requests, long waits and edge cases."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

from tests.chaos.client import Client
from tests.e2e.programs import until

PAGES = 5
PAD = {"note": "x" * 600}
FIRST_ANSWER_S = 45.0


def scheduled(client: Client) -> None:
    """A schedule is paused, resumed and replaced; it fires once; then the job is rerun."""
    later = {"rate": {"every": 1, "unit": "day"}}
    tasks = [{"url": url} for url in client.site.urls(PAGES)]
    body = {"type": "scheduled", "schedule": later, "tasks": tasks}
    job = f"/v1/jobs/{client.post('/v1/jobs', body)['job_id']}"
    for state in ("paused", "active"):
        client.post(f"{job}/schedule/state", {"schedule_state": state})
    soon = (datetime.now(UTC) + timedelta(seconds=5)).strftime("%Y-%m-%dT%H:%M:%S")
    client.put(f"{job}/schedule", {"at": soon, "timezone": "UTC"})

    until("it to fire", lambda: client.get(f"{job}/runs")["runs"] or None)
    client.completed(job.rpartition("/")[2], PAGES)
    client.post(f"{job}/rerun")
    client.completed(job.rpartition("/")[2], PAGES)
    assert len(client.get(f"{job}/runs")["runs"]) == 2


def streamed(client: Client) -> None:
    """Lists too long for memory: one with an invalid line is refused, valid ones are ingested."""
    good = [{"url": url, "metadata": PAD} for url in client.site.urls(1_000)]
    bad = client.post("/v1/jobs", {"tasks": [*good, {"url": "ftp://x"}]}, expect=400)
    assert bad["invalid_tasks"], bad
    body = {"tasks": good, "max_inflight": 200, "status": "open"}
    job_id = client.post("/v1/jobs", body)["job_id"]
    client.post(f"/v1/jobs/{job_id}/tasks", {"tasks": good, "last_batch": True})
    client.completed(job_id, 2 * len(good))


def hooked(client: Client) -> None:
    """A webhook without a receiver is replaced by one with a receiver, then removed; signing keys
    are rotated and removed."""
    keys = "/v1/hmac/keys/rotate"
    client.post(keys)
    client.post(keys)
    client.remove(keys)
    client.post(keys)
    client.post(f"{keys}/finalize", expect=409)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        job_id = client.submit(range(PAGES), webhook={"url": silent_url})
        client.completed(job_id, PAGES)
        log = f"/v1/jobs/{job_id}/webhook/deliveries"
        until("a try", lambda: any(e["attempts"] for e in client.get(log)["deliveries"]) or None)
    client.put(f"/v1/jobs/{job_id}/webhook", {"url": client.receiver.url, "signature": False})
    client.remove(f"/v1/jobs/{job_id}/webhook")
    client.finds_nothing(f"/v1/jobs/{job_id}/webhook")


def capped(client: Client) -> None:
    """A run uses a budget, gets unused credits back, and has its budget raised.

    Credits that a poller had reserved when it died stay spent (SPEC.md 4.9), so after a death the
    run may wait until the budget is raised.
    """
    job_id = client.submit(range(20), budget={"credits": 5}, max_inflight=3)

    def ended_or_out_of_budget() -> bool:
        run = client.get(f"/v1/jobs/{job_id}")["latest_run"]
        return bool(run["terminal"] or run.get("waiting_on", {}).get("reason") == "budget")

    until("the run to end or to use up its budget", ended_or_out_of_budget)
    client.put(f"/v1/jobs/{job_id}/budget", {"credits": 100})
    client.completed(job_id, 20)


def limited(client: Client) -> None:
    """A run has host limits: two requests at the same time, and 25 a second."""
    limits = {"concurrency": 2, "rate_per_s": 25.0}
    client.completed(client.submit(range(100), host_limits=limits, max_inflight=60), 100)


def drained(client: Client) -> None:
    """The server is stopped while it works, and started again."""
    job_id = client.submit(range(300), host_limits={"concurrency": 4}, max_inflight=100)
    until("work", lambda: client.get(f"/v1/jobs/{job_id}")["latest_run"]["stats"]["completed"])
    client.stop_and_start()
    client.completed(job_id, 300)


def looked_at(client: Client) -> None:
    """The client reads everything of a run that inherited results from another run."""
    job_id = client.submit((0, 1, 7))
    client.completed(job_id, 3)
    job = f"/v1/jobs/{job_id}"
    client.post(f"{job}/rerun?status=failed&dry_run=true")
    client.post(f"{job}/rerun?status=failed")
    run = client.completed(job_id, 3)
    results = client.get(f"{job}/results")["results"]
    for result in results:
        if result["status"] == "successful":
            client.download(f"http://x/{job[1:]}/tasks/{result['task_id']}/content?redirect=true")
            assert client.download(f"http://x/{job[1:]}/tasks/{result['task_id']}/content")
        client.get(f"{job}/runs/{run['run_id']}/tasks/{result['task_id']}/history")
    assert client.get("/v1/events")["events"]
    client.get("/v1/events?after=latest")
    client.download("http://x/metrics")
    client.download("http://x/readyz")


def scrubbed(client: Client) -> None:
    """A job with an uploaded list is deleted while it runs; no body of it is left."""
    slot = client.post("/v1/job_inputs", {"format": "text"})
    client.upload(slot["upload"]["url"], "\n".join(client.site.urls(PAGES)).encode())
    job_id = client.post("/v1/jobs", {"file_input_id": slot["file_input_id"]})["job_id"]
    run = client.completed(job_id, PAGES)
    client.post(f"/v1/jobs/{job_id}/rerun")
    client.completed(job_id, PAGES)
    client.post(f"/v1/jobs/{job_id}/rerun")
    client.delete(f"/v1/jobs/{job_id}/runs/{run['run_id']}")
    client.delete(f"/v1/jobs/{job_id}")
    blobs = client.server.data_dir / "blobs"
    folders = [blobs / "jobs" / job_id, blobs / "sources" / job_id]

    def is_gone() -> bool | None:
        client.finds_nothing(f"/v1/jobs/{job_id}")
        left = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return not left or None

    until("all of it to go", is_gone, deadline_s=120)


def cut_short(client: Client) -> None:
    """A run is stopped while its list is ingested, rerun from the list, and deleted."""
    slot = client.post("/v1/job_inputs", {"format": "text"})
    client.upload(slot["upload"]["url"], "\n".join(client.site.urls(20_000)).encode())
    body = {"file_input_id": slot["file_input_id"], "max_inflight": 1}
    job = f"/v1/jobs/{client.post('/v1/jobs', body)['job_id']}"
    client.post(f"{job}/stop", expect=409)
    run = client.ended(job.rpartition("/")[2])
    client.post(f"{job}/rerun?dry_run=true")
    client.post(f"{job}/rerun")
    client.remove(f"{job}/runs/{run['run_id']}")
    client.delete(job)
    client.finds_nothing(job)


def slow(client: Client) -> None:
    """A page takes 45 s once: its lease, claim and message are extended meanwhile."""
    with _a_slow_page() as url:
        job_id = str(client.post("/v1/jobs", {"tasks": [{"url": url}]})["job_id"])
        client.completed(job_id, 1)


@contextmanager
def _a_slow_page() -> Iterator[str]:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    is_over = threading.Event()

    def serve(listening: socket.socket) -> None:
        delay_s = FIRST_ANSWER_S
        with suppress(OSError):  # The listening socket is closed at the end.
            while True:
                client, _ = listening.accept()
                threading.Thread(target=reply, args=(client, delay_s)).start()
                delay_s = 0.0

    def reply(client: socket.socket, delay_s: float) -> None:
        with client, suppress(OSError):
            client.recv(1 << 16)
            is_over.wait(delay_s)
            client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        is_over.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
