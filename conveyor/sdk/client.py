"""The synchronous client: a method for each call of the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from conveyor.domain.lifecycle import EXPORT_UNDONE
from conveyor.schemas.budget import BudgetInput
from conveyor.schemas.requests import (
    CreateJobInputRequest,
    SubmitJobRequest,
    TaskInput,
    WebhookInput,
)
from conveyor.schemas.responses import (
    AddTasksResponse,
    AuditResponse,
    EventResponse,
    ExportResponse,
    JobResponse,
    RerunDryRunResponse,
    RerunJobResponse,
    RunResponse,
    StartExportResponse,
    SubmitDryRunResponse,
    SubmitJobResponse,
    TaskHistoryEvent,
    TaskResult,
    WebhookResponse,
)
from conveyor.schemas.schedules import JobSchedule
from conveyor.schemas.webhooks import (
    DeliveryResponse,
    HmacKeyCreated,
    HmacKeyFinalized,
    HmacKeyList,
    WebhookTestResponse,
)
from conveyor.sdk import operations
from conveyor.sdk.connection import Connection
from conveyor.sdk.downloads import Downloaded, is_direct, save_all
from conveyor.sdk.errors import ApiError, SdkError
from conveyor.sdk.operations import Choice
from conveyor.sdk.retry import PollBackoff, run_of

JOBS_PAGE = 100
RESULTS_PAGE = 500
EVENTS_PAGE = 500


class Client(Connection):
    """A caller of one server.

    Every method raises ApiError when the server refuses, Unreachable when nobody answers, and
    BadId for a text that cannot be an id. A POST happens once, however often it had to be sent:
    each carries an Idempotency-Key, and `idempotency_key` lets a caller choose it, to be able to
    repeat the call after a crash of its own.

    One client may be shared among threads.
    """

    def submit(
        self, job: SubmitJobRequest | Iterable[str], *, idempotency_key: str | None = None
    ) -> SubmitJobResponse:
        """Submits a job, or a plain list of URLs as one."""
        return self._ask(operations.submit(job), idempotency_key)

    def preview(self, job: SubmitJobRequest | Iterable[str]) -> SubmitDryRunResponse:
        """What submitting this would do and cost; nothing is created."""
        return self._ask(operations.preview(job))

    def upload(self, path: Path, request: CreateJobInputRequest | None = None) -> str:
        """Uploads a list and answers with the `file_input_id` that `submit` takes for it.

        The list is text, a URL a line, unless `request` says how else it is to be read.
        """
        made = self._ask(operations.create_input(request or CreateJobInputRequest(format="text")))
        self._put_file(made.upload, path)
        return made.file_input_id

    def add_tasks(
        self,
        job_id: str,
        tasks: Iterable[str | TaskInput],
        *,
        last: bool = False,
        idempotency_key: str | None = None,
    ) -> AddTasksResponse:
        """Adds a list to an open job; `last` closes the job behind it."""
        return self._ask(operations.add_tasks(job_id, tasks, last=last), idempotency_key)

    def close(self, job_id: str) -> JobResponse:
        """No more tasks will come: the run ends when those it has are done."""
        return self._ask(operations.close(job_id))

    def get(self, job_id: str) -> JobResponse:
        return self._ask(operations.get(job_id))

    def list(self, *, status: str | None = None) -> Iterator[JobResponse]:
        """The caller's jobs, newest first, read page by page as they are asked for."""
        cursor = None
        while True:
            page = self._ask(operations.list_jobs(status, limit=JOBS_PAGE, cursor=cursor))
            yield from page.jobs
            if (cursor := page.next_cursor) is None:
                return

    def runs(self, job_id: str) -> Iterator[RunResponse]:
        """The runs of a job, newest first."""
        cursor = None
        while True:
            page = self._ask(operations.list_runs(job_id, limit=JOBS_PAGE, cursor=cursor))
            yield from page.runs
            if (cursor := page.next_cursor) is None:
                return

    def run(self, job_id: str, run_id: str) -> RunResponse:
        return self._ask(operations.get_run(job_id, run_id))

    def set_budget(self, job_id: str, budget: BudgetInput) -> JobResponse:
        """Another budget for a job: a run that waits for it goes on."""
        return self._ask(operations.set_budget(job_id, budget))

    def stop(self, job_id: str) -> RunResponse:
        """Stops the latest run; its `receipt` tells what was let go."""
        return self._ask(operations.stop(job_id))

    def pause(self, job_id: str) -> RunResponse:
        return self._ask(operations.pause(job_id))

    def resume(self, job_id: str) -> RunResponse:
        return self._ask(operations.resume(job_id))

    def rerun(
        self,
        job_id: str,
        *,
        statuses: Iterable[str] | None = None,
        reasons: Iterable[str] | None = None,
        hosts: Iterable[str] | None = None,
        idempotency_key: str | None = None,
    ) -> RerunJobResponse:
        """Runs everything again; or only tasks that all of `statuses`, `reasons` of failure and
        `hosts` name, and inherits the others."""
        return self._ask(
            operations.rerun(job_id, Choice(statuses, reasons, hosts)), idempotency_key
        )

    def preview_rerun(
        self,
        job_id: str,
        *,
        statuses: Iterable[str] | None = None,
        reasons: Iterable[str] | None = None,
        hosts: Iterable[str] | None = None,
    ) -> RerunDryRunResponse:
        """What a rerun would do and cost; nothing is created."""
        return self._ask(operations.preview_rerun(job_id, Choice(statuses, reasons, hosts)))

    def audit(self, job_id: str, *, run_id: str | None = None) -> AuditResponse:
        """A run (the latest, if none is named) recounted from its rows. Reads every row: a large
        run takes a while, and a client with a longer `timeout_s`."""
        run_id = run_id or run_of(self.get(job_id)).run_id
        return self._ask(operations.audit(job_id, run_id))

    def events(self, *, after: str | None = None) -> Iterator[EventResponse]:
        """What happened to the caller's jobs, oldest first, up to now; only what came behind the
        event of this id, if one is named."""
        while True:
            page = self._ask(operations.list_events(after, limit=EVENTS_PAGE))
            yield from page.events
            if len(page.events) < EVENTS_PAGE:
                return
            after = page.last_id

    def follow_events(
        self, *, after: str | None = None, interval_s: float = 1.0
    ) -> Iterator[EventResponse]:
        """As `events`, and then each as it comes, for ever. Outages are up to the caller: going
        on behind the last event misses nothing."""
        while True:
            for event in self.events(after=after):
                yield event
                after = event.id
            self._sleep(interval_s)

    def set_schedule(self, job_id: str, schedule: JobSchedule) -> JobResponse:
        """Replaces the schedule of a scheduled job; a run that is live goes on."""
        return self._ask(operations.set_schedule(job_id, schedule))

    def set_schedule_state(self, job_id: str, state: Literal["active", "paused"]) -> JobResponse:
        """Pauses or resumes the schedule; times that pass meanwhile make no run."""
        return self._ask(operations.set_schedule_state(job_id, state))

    def delete(self, job_id: str) -> None:
        """Deletes a job with everything it made."""
        self._ask(operations.delete(job_id))

    def delete_run(self, job_id: str, run_id: str) -> None:
        """Deletes one run and its results."""
        self._ask(operations.delete_run(job_id, run_id))

    def results(
        self, job_id: str, *, run_id: str | None = None, status: str | None = None
    ) -> Iterator[TaskResult]:
        """The tasks of a run (the latest, if none is named), page by page; exact once it ended."""
        cursor = None
        while True:
            page = self._ask(
                operations.list_results(job_id, run_id, status, limit=RESULTS_PAGE, cursor=cursor)
            )
            yield from page.results
            if (cursor := page.next_cursor) is None:
                return

    def history(
        self, job_id: str, task_id: str, *, run_id: str | None = None
    ) -> tuple[TaskHistoryEvent, ...]:
        """Every try at a task."""
        return tuple(self._ask(operations.get_history(job_id, task_id, run_id)).events)

    def content(self, job_id: str, task_id: str, *, run_id: str | None = None) -> bytes:
        """The body of a task, in memory."""
        call = operations.get_content(job_id, task_id, run_id)
        return self._trying(lambda: self._content(call))

    def download(
        self, job_id: str, task_id: str, path: Path, *, run_id: str | None = None
    ) -> Downloaded:
        """The body of a task as a file, which is whole or not there."""
        call = operations.get_content(job_id, task_id, run_id)
        return self._trying(lambda: self._download(call, path))

    def download_all(
        self, job_id: str, paths: Mapping[str, Path], *, run_id: str | None = None
    ) -> dict[str, Downloaded | ApiError]:
        """The bodies of tasks as files, several at a time; an ApiError where there is none.

        Not to be called from within an event loop of Trio. Through a proxy, one at a time.
        """
        wanted = {
            task_id: (operations.get_content(job_id, task_id, run_id), path)
            for task_id, path in paths.items()
        }
        if is_direct(self.base_url, trust_env=self._http.trust_env):
            timeout_s, retry = self._timeout_s, self._retry
            return save_all(self.base_url, self._api_key, wanted, timeout_s=timeout_s, retry=retry)
        return {task_id: self._saved(call, path) for task_id, (call, path) in wanted.items()}

    def webhook(self, job_id: str) -> WebhookResponse:
        """The job's webhook; ApiError 404 where there is none."""
        return self._ask(operations.get_webhook(job_id))

    def set_webhook(self, job_id: str, webhook: WebhookInput) -> WebhookResponse:
        """Holds for every delivery that has not been made yet."""
        return self._ask(operations.put_webhook(job_id, webhook))

    def remove_webhook(self, job_id: str) -> None:
        """Removes the webhook and drops what was not delivered."""
        self._ask(operations.delete_webhook(job_id))

    def deliveries(self, job_id: str) -> Iterator[DeliveryResponse]:
        """The job's events, newest first, each with the latest tries at delivering it."""
        cursor = None
        while True:
            page = self._ask(operations.list_deliveries(job_id, limit=JOBS_PAGE, cursor=cursor))
            yield from page.deliveries
            if (cursor := page.next_cursor) is None:
                return

    def redeliver(self, job_id: str, event_id: str) -> DeliveryResponse:
        """Delivers an event once more: the same id, the same bytes."""
        return self._ask(operations.redeliver(job_id, event_id))

    def test_webhook(self, webhook: WebhookInput) -> WebhookTestResponse:
        """Has a test event sent to a receiver, and tells how it took it."""
        return self._ask(operations.test_webhook(webhook))

    def hmac_keys(self) -> HmacKeyList:
        """The keys that sign webhooks, without their secrets."""
        return self._ask(operations.list_hmac_keys())

    def rotate_hmac_key(self, *, idempotency_key: str | None = None) -> HmacKeyCreated:
        """Makes the first key, or a candidate to follow it. Its secret is shown this once."""
        return self._ask(operations.rotate_hmac_key(), idempotency_key)

    def finalize_hmac_key(self) -> HmacKeyFinalized:
        """Makes the candidate the active key."""
        return self._ask(operations.finalize_hmac_key())

    def cancel_hmac_rotation(self) -> None:
        """Drops the candidate, if there is one."""
        self._ask(operations.cancel_hmac_rotation())

    def start_export(
        self, job_id: str, run_id: str, *, kind: str = "zip", idempotency_key: str | None = None
    ) -> StartExportResponse:
        """Asks for the results of an ended run as one file: zip, jsonl, csv or warc."""
        return self._ask(operations.start_export(job_id, run_id, kind), idempotency_key)

    def get_export(self, job_id: str, run_id: str, export_id: str) -> ExportResponse:
        return self._ask(operations.get_export(job_id, run_id, export_id))

    def wait_for_export(
        self,
        job_id: str,
        run_id: str,
        export_id: str,
        on_progress: Callable[[ExportResponse], None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> ExportResponse:
        """Looks at an export until it is made, or has failed."""
        pace = PollBackoff(begun_at=time.monotonic(), timeout_s=timeout_s)
        while True:
            export = self.get_export(job_id, run_id, export_id)
            if on_progress is not None:
                on_progress(export)
            if export.status not in EXPORT_UNDONE:
                return export
            self._sleep(pace.interval_s(time.monotonic()))

    def download_export(self, job_id: str, run_id: str, export_id: str, path: Path) -> Downloaded:
        """The file of an export, which is whole or not there."""
        call = operations.get_export_content(job_id, run_id, export_id)
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
        pace = PollBackoff(begun_at=time.monotonic(), timeout_s=timeout_s)
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
