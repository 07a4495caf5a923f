"""The synchronous client: sends the calls, waits, and repeats what is worth repeating."""

from __future__ import annotations

import ipaddress
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx

from conveyor.sdk import calls
from conveyor.sdk.calls import Call
from conveyor.sdk.downloads import Damaged, Download, Downloaded, replacing
from conveyor.sdk.errors import SdkError, Unreachable, error_from
from conveyor.sdk.polling import Pace, run_of
from conveyor.sdk.retrying import RetryPolicy
from conveyor.wire.limits import BudgetInput
from conveyor.wire.requests import SubmitJobRequest, TaskInput
from conveyor.wire.responses import (
    AddTasksResponse,
    JobResponse,
    RerunJobResponse,
    RunResponse,
    SubmitJobResponse,
    TaskHistoryEvent,
    TaskResult,
)

T = TypeVar("T")

JOBS_PAGE = 100
RESULTS_PAGE = 500
REDIRECTS_MAX = 3
PIECE_BYTES = 65_536


class Client:
    """A caller of one server.

    Every method raises ApiError when the server refuses, Unreachable when nobody answers, and
    BadId for a text that cannot be an id. A POST happens once, however often it had to be sent:
    each carries an Idempotency-Key, and `idempotency_key` lets a caller choose it, to be able to
    repeat the call after a crash of its own.

    One client may be shared among threads.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout_s: float = 30.0,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """ValueError for a `base_url` or an `api_key` that no request could be made with."""
        self.base_url = _checked_url(base_url)
        self._api_key = _checked_key(api_key)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._http = httpx.Client(
            timeout=timeout_s,
            headers={"Accept-Encoding": "identity", "User-Agent": "conveyor-sdk"},
            trust_env=not _is_loopback(self.base_url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Closes the connections; `close` is what happens to jobs."""
        self._http.close()

    def submit(
        self, job: SubmitJobRequest | Iterable[str], *, idempotency_key: str | None = None
    ) -> SubmitJobResponse:
        """Submits a job, or a plain list of URLs as one."""
        return self._ask(calls.submit(job), idempotency_key)

    def add_tasks(
        self,
        job_id: str,
        tasks: Iterable[str | TaskInput],
        *,
        last: bool = False,
        idempotency_key: str | None = None,
    ) -> AddTasksResponse:
        """Adds a list to an open job; `last` closes the job behind it."""
        return self._ask(calls.add_tasks(job_id, tasks, last=last), idempotency_key)

    def close(self, job_id: str) -> JobResponse:
        """No more tasks will come: the run ends when those it has are done."""
        return self._ask(calls.close(job_id))

    def get(self, job_id: str) -> JobResponse:
        return self._ask(calls.get(job_id))

    def list(self, *, status: str | None = None) -> Iterator[JobResponse]:
        """The caller's jobs, newest first, read page by page as they are asked for."""
        cursor = None
        while True:
            page = self._ask(calls.list_jobs(status, limit=JOBS_PAGE, cursor=cursor))
            yield from page.jobs
            if (cursor := page.next_cursor) is None:
                return

    def runs(self, job_id: str) -> Iterator[RunResponse]:
        """The runs of a job, newest first."""
        cursor = None
        while True:
            page = self._ask(calls.list_runs(job_id, limit=JOBS_PAGE, cursor=cursor))
            yield from page.runs
            if (cursor := page.next_cursor) is None:
                return

    def run(self, job_id: str, run_id: str) -> RunResponse:
        return self._ask(calls.get_run(job_id, run_id))

    def set_budget(self, job_id: str, budget: BudgetInput) -> JobResponse:
        """Another budget for a job: a run that waits for it goes on."""
        return self._ask(calls.set_budget(job_id, budget))

    def stop(self, job_id: str) -> RunResponse:
        """Stops the latest run; its `receipt` tells what was let go."""
        return self._ask(calls.stop(job_id))

    def pause(self, job_id: str) -> RunResponse:
        return self._ask(calls.pause(job_id))

    def resume(self, job_id: str) -> RunResponse:
        return self._ask(calls.resume(job_id))

    def rerun(
        self,
        job_id: str,
        *,
        statuses: Iterable[str] | None = None,
        idempotency_key: str | None = None,
    ) -> RerunJobResponse:
        """Runs everything again; with `statuses`, only such tasks, and inherits the others."""
        return self._ask(calls.rerun(job_id, statuses), idempotency_key)

    def delete(self, job_id: str) -> None:
        """Deletes a job with everything it made."""
        self._ask(calls.delete(job_id))

    def delete_run(self, job_id: str, run_id: str) -> None:
        """Deletes one run and its results."""
        self._ask(calls.delete_run(job_id, run_id))

    def results(
        self, job_id: str, *, run_id: str | None = None, status: str | None = None
    ) -> Iterator[TaskResult]:
        """The tasks of a run (the latest, if none is named), page by page; exact once it ended."""
        cursor = None
        while True:
            page = self._ask(
                calls.list_results(job_id, run_id, status, limit=RESULTS_PAGE, cursor=cursor)
            )
            yield from page.results
            if (cursor := page.next_cursor) is None:
                return

    def history(
        self, job_id: str, task_id: str, *, run_id: str | None = None
    ) -> tuple[TaskHistoryEvent, ...]:
        """Every try at a task."""
        return tuple(self._ask(calls.get_history(job_id, task_id, run_id)).events)

    def content(self, job_id: str, task_id: str, *, run_id: str | None = None) -> bytes:
        """The body of a task, in memory."""
        call = calls.get_content(job_id, task_id, run_id)
        return self._trying(lambda: self._content(call))

    def download(
        self, job_id: str, task_id: str, path: Path, *, run_id: str | None = None
    ) -> Downloaded:
        """The body of a task as a file, which is whole or not there."""
        call = calls.get_content(job_id, task_id, run_id)
        return self._trying(lambda: self._download(call, path))

    def wait(
        self,
        job_id: str,
        on_progress: Callable[[RunResponse], None] | None = None,
        *,
        run_id: str | None = None,
        timeout_s: float | None = None,
    ) -> RunResponse:
        """Looks at a run (the latest, if none is named) until it has ended.

        An outage shorter than half a minute is sat out. TimeoutError after `timeout_s`. The run
        of an open job ends only once the job is closed.
        """
        run = self.run(job_id, run_id) if run_id else run_of(self.get(job_id))
        pace = Pace(begun_at=time.monotonic(), timeout_s=timeout_s)
        while True:
            if on_progress is not None:
                on_progress(run)
            if run.terminal:
                return run
            self._sleep(pace.interval_s(time.monotonic()))
            try:
                run = self.run(job_id, run.run_id)
            except SdkError as error:
                if not pace.sits_out(error, time.monotonic()):
                    raise
            else:
                pace.seen(time.monotonic())

    def _ask(self, call: Call[T], key: str | None = None) -> T:
        request = self._request(call, key or secrets.token_hex(16))

        def once() -> T:
            try:
                response = self._http.send(request)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            return call.read(response.status_code, response.headers, response.content)

        return self._trying(once)

    def _trying(self, once: Callable[[], T]) -> T:
        for attempt in count(1):
            try:
                return once()
            except SdkError as error:
                luck = random.random()  # noqa: S311 (it spreads load, it keeps no secret)
                pause_s = self._retry.pause_s(error, attempt=attempt, luck=luck)
                if pause_s is None:
                    raise
            self._sleep(pause_s)
        raise AssertionError("a policy gives up in the end")

    def _request(self, call: Call[T], key: str) -> httpx.Request:
        headers = {"X-API-Key": self._api_key}
        if call.method == "POST":
            headers["Idempotency-Key"] = key
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        return self._http.build_request(
            call.method,
            self.base_url + call.path,
            params=dict(call.query) or None,
            content=call.body,
            headers=headers,
        )

    def _content(self, call: Call[None]) -> bytes:
        with self._streaming(call) as response:
            return response.read()

    def _download(self, call: Call[None], path: Path) -> Downloaded:
        with self._streaming(call) as response, replacing(path) as file:
            download = Download(file)
            for piece in response.iter_bytes(PIECE_BYTES):
                download.take(piece)
            return download.finish(response.headers)

    @contextmanager
    def _streaming(self, call: Call[None]) -> Iterator[httpx.Response]:
        """The answer to a call, its body still to be read."""
        try:
            with closing(self._followed(self._request(call, ""))) as response:
                if not response.is_success:
                    raise error_from(response.status_code, response.headers, response.read())
                yield response
        except (httpx.TransportError, Damaged) as error:
            raise self._unreachable(error) from error

    def _followed(self, request: httpx.Request) -> httpx.Response:
        """Where redirects lead. They are followed without the API key: it is for us alone."""
        response = self._http.send(request, stream=True)
        for _ in range(REDIRECTS_MAX):
            if response.next_request is None:
                break
            response.close()
            response.next_request.headers.pop("X-API-Key", None)
            response = self._http.send(response.next_request, stream=True)
        return response

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(self.base_url, str(error) or type(error).__name__)


def _checked_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"{text!r} is not the address of a server, like http://127.0.0.1:8080")
    return str(url).rstrip("/").removesuffix("/v1")


def _checked_key(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("an API key is printable ASCII characters, without spaces around them")
    return text


def _is_loopback(url: str) -> bool:
    """No proxy of the environment leads to this very machine."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
