"""Uses of each action that the roles of the program are granted (docs/deploy.md, Permissions).

A use makes the API or a worker call the action. It ignores the responses: without the permission
they are errors, and the log of the process must name the cause.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import httpx

from conveyor.cli.demo import Site
from conveyor.domain import limits
from tests.deploy.containers.stage import Stage, until

DAILY = {"rate": {"every": 1, "unit": "day"}}
# Together more than the 512 KiB that the API reads into memory, so the list is staged.
LONG_TASKS, LONG_URL_CHARS = 1_500, 400
# More than one part of a multipart upload, which has 8 MiB.
PARTS_BYTES = 12 * 1024 * 1024
# Nothing listens on this port.
UPLOADED = [f"http://127.0.0.1:9/{n}" for n in range(20)]
# Large pages: an export reads few at a time, and they fill more than one part of an upload.
LARGE_BYTES, LARGE_COUNT = 3 * 1024 * 1024, 6


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller of the deployed API."""

    stage: Stage
    http: httpx.Client
    site: Site

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Posts and returns the response; an empty one if the API cannot answer."""
        with suppress(httpx.TimeoutException):
            answer = self.http.post(path, json=body)
            if answer.is_success:
                body_json: dict[str, Any] = answer.json()
                return body_json
        return {}

    def ask(self, method: str, path: str) -> None:
        with suppress(httpx.TimeoutException):
            self.http.request(method, path)

    def tasks(self, count: int) -> list[dict[str, str]]:
        return [{"url": url} for url in self.site.urls(count)]

    def long_list(self) -> list[dict[str, str]]:
        padding = "x" * LONG_URL_CHARS
        return [{"url": f"{url}?{padding}"} for url in self.site.urls(LONG_TASKS)]

    def submit(self, count: int = 1, **more: Any) -> str:
        return str(self.post("/v1/jobs", tasks=self.tasks(count), **more).get("job_id"))

    def latest_run(self, job_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.http.get(f"/v1/jobs/{job_id}").json()["latest_run"]
        return run

    def finished(self) -> str:
        """Submits a job and waits until it has ended."""
        job_id = self.submit(3)
        until("the job to end", lambda: self.latest_run(job_id)["terminal"])
        return job_id


Act = Callable[[], object]
Use = Callable[[Caller], Act]
"""Prepares with all permissions, and returns the act that is done without one of them."""


def submit(caller: Caller) -> Act:
    # Some of these pages fail at first and are retried.
    return lambda: caller.submit(20)


def list_jobs(caller: Caller) -> Act:
    caller.submit()
    return lambda: caller.ask("GET", "/v1/jobs")


def read_job(caller: Caller) -> Act:
    job_id = caller.submit()
    return lambda: caller.ask("GET", f"/v1/jobs/{job_id}")


def pause(caller: Caller) -> Act:
    job_id = caller.submit(status="open")
    return lambda: caller.ask("POST", f"/v1/jobs/{job_id}/pause")


def stop(caller: Caller) -> Act:
    job_id = caller.submit(status="open")
    return lambda: caller.ask("POST", f"/v1/jobs/{job_id}/stop")


def delete_schedule(caller: Caller) -> Act:
    job_id = caller.submit(type="scheduled", schedule=DAILY)
    return lambda: caller.ask("DELETE", f"/v1/jobs/{job_id}")


def list_runs_after_a_loss(caller: Caller) -> Act:
    """Deletes the row of a run; a list of runs then removes the pointer to it."""
    job_id = caller.submit()
    run_id = caller.latest_run(job_id)["run_id"]
    key = {"pk": {"S": f"Job#{job_id}"}, "sk": {"S": f"Run#{run_id}"}}
    table = caller.stage.outputs("conveyor-data")["Table"]
    caller.stage.client("dynamodb").delete_item(TableName=table, Key=key)
    return lambda: caller.ask("GET", f"/v1/jobs/{job_id}/runs")


def read_page(caller: Caller) -> Act:
    job_id = caller.finished()
    (row, *_) = caller.http.get(f"/v1/jobs/{job_id}/results?status=successful").json()["results"]
    return lambda: caller.ask("GET", f"/v1/jobs/{job_id}/tasks/{row['task_id']}/content")


def submit_long_list(caller: Caller) -> Act:
    return lambda: caller.post("/v1/jobs", tasks=caller.long_list(), max_inflight=1)


def submit_upload(*lines: str) -> Use:
    """Submits an uploaded list, which a worker ingests however short it is. The API removes its
    copy of a list without lines."""

    def prepare(caller: Caller) -> Act:
        spec = {"header": True, "fields": {"url": "link"}}
        slot = caller.post("/v1/job_inputs", type="csv", csv=spec)
        upload = slot["upload"]
        content = "".join(f"{line}\r\n" for line in ("link", *lines)).encode()
        trusted = ssl.create_default_context(cafile=str(caller.stage.certificate))
        with httpx.Client(verify=trusted) as s3:
            sent = s3.request(
                upload["method"], upload["url"], content=content, headers=upload["headers"]
            )
        assert sent.is_success, sent.text
        return lambda: caller.post("/v1/jobs", file_input_id=slot["file_input_id"])

    return prepare


def submit_medium_list(caller: Caller) -> Act:
    return lambda: caller.submit(limits.INLINE_TASKS_MAX + 1)


def break_off_long_list(caller: Caller) -> Act:
    """Sends more than one part of a list, and closes the connection."""
    address = urlsplit(str(caller.http.base_url))
    line = b'{"url": "%s"},' % caller.long_list()[0]["url"].encode()
    body = b'{"tasks": [' + line * (PARTS_BYTES // len(line))
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"X-API-Key: {caller.http.headers['X-API-Key']}\r\nContent-Length: {2 * len(body)}\r\n\r\n"
    )

    def send() -> None:
        assert address.hostname is not None
        with socket.create_connection((address.hostname, address.port or 80), timeout=120) as peer:
            peer.sendall(head.encode() + body)

    return send


def ingest_without_a_queue(caller: Caller) -> Act:
    """Deletes the queue of a run; the worker that ingests a list creates it again."""
    job_id = caller.submit(status="open")
    run_id = caller.latest_run(job_id)["run_id"]
    queues = caller.stage.client("sqs")
    (url,) = [item for item in queues.list_queues()["QueueUrls"] if item.endswith(run_id)]
    queues.delete_queue(QueueUrl=url)
    return lambda: caller.post(f"/v1/jobs/{job_id}/tasks", tasks=caller.long_list())


def finish_workflow(caller: Caller) -> Act:
    return lambda: caller.submit(sfn_task_token="a-token")


def stop_workflow(caller: Caller) -> Act:
    job_id = caller.submit(status="open", sfn_task_token="a-token")
    return lambda: caller.ask("POST", f"/v1/jobs/{job_id}/stop")


def export(caller: Caller) -> Act:
    job_id = caller.finished()
    run_id = caller.latest_run(job_id)["run_id"]
    return lambda: caller.ask("POST", f"/v1/jobs/{job_id}/runs/{run_id}/exports")


def break_off_export(caller: Caller) -> Act:
    """Deletes the body of the last page, so that the export fails after several parts."""
    with large_pages() as urls:
        job_id = str(caller.post("/v1/jobs", tasks=[{"url": url} for url in urls]).get("job_id"))
        until("the job to end", lambda: caller.latest_run(job_id)["terminal"])
    run_id = caller.latest_run(job_id)["run_id"]
    s3, bucket = caller.stage.client("s3"), caller.stage.outputs("conveyor-data")["Bucket"]
    bodies = s3.list_objects_v2(Bucket=bucket, Prefix=f"jobs/{job_id}/runs/{run_id}/")["Contents"]
    # The export reads the tasks in the order of their ids, which are in the keys.
    s3.delete_object(Bucket=bucket, Key=max(body["Key"] for body in bodies))
    return lambda: caller.ask("POST", f"/v1/jobs/{job_id}/runs/{run_id}/exports")


@contextmanager
def large_pages() -> Iterator[list[str]]:
    """Serves pages that cannot be compressed, and yields their URLs."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(LARGE_BYTES))
            self.end_headers()
            self.wfile.write(os.urandom(LARGE_BYTES))

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
            """Does not log requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield [f"http://127.0.0.1:{server.server_port}/{n}" for n in range(LARGE_COUNT)]
        server.shutdown()


def delete_job(caller: Caller) -> Act:
    job_id = caller.finished()
    return lambda: caller.ask("DELETE", f"/v1/jobs/{job_id}")


def start_process(caller: Caller) -> Act:
    """A new process of the role; the test starts it and reads what it prints."""
    return lambda: None


@dataclass(frozen=True, slots=True)
class Granted:
    """The purpose of an action, and a use of it. `beside` is another action that is removed with
    it, because the program needs the first one only without the other."""

    purpose: str
    use: Use
    beside: str = ""


USES: dict[str, dict[str, Granted]] = {
    "api": {
        "dynamodb:GetItem": Granted("reads a job", read_job),
        "dynamodb:BatchGetItem": Granted("lists jobs", list_jobs),
        "dynamodb:Query": Granted("lists jobs", list_jobs),
        "dynamodb:PutItem": Granted("submits a job", submit),
        "dynamodb:UpdateItem": Granted("pauses a run", pause),
        "dynamodb:DeleteItem": Granted("deletes a scheduled job", delete_schedule),
        "dynamodb:BatchWriteItem": Granted(
            "removes pointers to rows that are gone", list_runs_after_a_loss
        ),
        "dynamodb:PartiQLInsert": Granted("ingests a list of medium length", submit_medium_list),
        "dynamodb:ConditionCheckItem": Granted("starts an export", export),
        "sqs:CreateQueue": Granted("submits a job", submit),
        "sqs:GetQueueUrl": Granted("finds the control queue when it starts", start_process),
        "sqs:SendMessage": Granted("submits a job", submit),
        "sqs:DeleteQueue": Granted("stops a run", stop),
        "s3:GetObject": Granted("serves a page", read_page),
        "s3:PutObject": Granted("stages a long list", submit_long_list),
        "s3:DeleteObject": Granted("removes a list that was refused", submit_upload()),
        "s3:ListBucket": Granted("removes a list that was refused", submit_upload()),
        "s3:AbortMultipartUpload": Granted("ends a list that breaks off", break_off_long_list),
    },
    "worker": {
        "dynamodb:GetItem": Granted("reads runs and leases", submit),
        "dynamodb:BatchGetItem": Granted("reads tasks", submit),
        "dynamodb:Query": Granted("finds live runs", submit),
        "dynamodb:PutItem": Granted("takes leases", submit),
        "dynamodb:UpdateItem": Granted("claims and settles tasks", submit),
        "dynamodb:DeleteItem": Granted("gives leases back", submit),
        "dynamodb:BatchWriteItem": Granted("deletes the rows of a job", delete_job),
        "dynamodb:PartiQLInsert": Granted("ingests long lists", submit_upload(*UPLOADED)),
        "dynamodb:ConditionCheckItem": Granted(
            "hands back a task that was never tried", submit, beside="s3:PutObject"
        ),
        "sqs:CreateQueue": Granted(
            "starts scheduled runs, restores a queue", ingest_without_a_queue
        ),
        "sqs:DeleteQueue": Granted("ends a run", submit),
        "sqs:GetQueueUrl": Granted("finds the queue of a run", submit),
        "sqs:GetQueueAttributes": Granted("measures what is left of a run", submit_long_list),
        "sqs:SendMessage": Granted("enqueues the tasks of a long list", submit_upload(*UPLOADED)),
        "sqs:ReceiveMessage": Granted("takes tasks", submit),
        "sqs:DeleteMessage": Granted("acknowledges tasks", submit),
        "sqs:ChangeMessageVisibility": Granted("delays a retry", submit),
        "s3:GetObject": Granted("reads long lists, writes exports", submit_upload(*UPLOADED)),
        "s3:PutObject": Granted("stores pages and exports", submit),
        "s3:DeleteObject": Granted("deletes the pages of a job", delete_job),
        "s3:ListBucket": Granted("deletes the pages of a job", delete_job),
        "s3:AbortMultipartUpload": Granted("ends an export that breaks off", break_off_export),
        "states:SendTaskSuccess": Granted("ends a task of Step Functions", finish_workflow),
        "states:SendTaskFailure": Granted("ends a task of Step Functions", stop_workflow),
    },
}
