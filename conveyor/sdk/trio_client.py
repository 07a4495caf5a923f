"""The client for Trio: the same methods as Client, to be awaited or iterated over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import trio

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
from conveyor.sdk.downloads import Downloaded
from conveyor.sdk.errors import ApiError, SdkError
from conveyor.sdk.operations import Choice
from conveyor.sdk.retry import PollBackoff, run_of
from conveyor.sdk.trio_connection import TrioConnection

JOBS_PAGE = 100
RESULTS_PAGE = 500
EVENTS_PAGE = 500


class TrioClient(TrioConnection):
    """A caller of one server.

    Every method raises ApiError when the server refuses, Unreachable when nobody answers, and
    BadId for a text that cannot be an id. A POST happens once, however often it had to be sent:
    each carries an Idempotency-Key, and `idempotency_key` lets a caller choose it, to be able to
    repeat the call after a crash of its own.

    One client may be shared among tasks.
    """

    async def submit(
        self, job: SubmitJobRequest | Iterable[str], *, idempotency_key: str | None = None
    ) -> SubmitJobResponse:
        """Submits a job, or a plain list of URLs as one."""
        return await self._ask(operations.submit(job), idempotency_key)

    async def preview(self, job: SubmitJobRequest | Iterable[str]) -> SubmitDryRunResponse:
        """What submitting this would do and cost; nothing is created."""
        return await self._ask(operations.preview(job))

    async def upload(self, path: Path, request: CreateJobInputRequest | None = None) -> str:
        """Uploads a list and answers with the `file_input_id` that `submit` takes for it.

        The list is text, a URL a line, unless `request` says how else it is to be read.
        """
        made = await self._ask(
            operations.create_input(request or CreateJobInputRequest(format="text"))
        )
        await self._put_file(made.upload, path)
        return made.file_input_id

    async def add_tasks(
        self,
        job_id: str,
        tasks: Iterable[str | TaskInput],
        *,
        last: bool = False,
        idempotency_key: str | None = None,
    ) -> AddTasksResponse:
        """Adds a list to an open job; `last` closes the job behind it."""
        return await self._ask(operations.add_tasks(job_id, tasks, last=last), idempotency_key)

    async def close(self, job_id: str) -> JobResponse:
        """No more tasks will come: the run ends when those it has are done."""
        return await self._ask(operations.close(job_id))

    async def get(self, job_id: str) -> JobResponse:
        return await self._ask(operations.get(job_id))

    async def list(self, *, status: str | None = None) -> AsyncGenerator[JobResponse, None]:
        """The caller's jobs, newest first, read page by page as they are asked for."""
        cursor = None
        while True:
            page = await self._ask(operations.list_jobs(status, limit=JOBS_PAGE, cursor=cursor))
            for each in page.jobs:
                yield each
            if (cursor := page.next_cursor) is None:
                return

    async def runs(self, job_id: str) -> AsyncGenerator[RunResponse, None]:
        """The runs of a job, newest first."""
        cursor = None
        while True:
            page = await self._ask(operations.list_runs(job_id, limit=JOBS_PAGE, cursor=cursor))
            for each in page.runs:
                yield each
            if (cursor := page.next_cursor) is None:
                return

    async def run(self, job_id: str, run_id: str) -> RunResponse:
        return await self._ask(operations.get_run(job_id, run_id))

    async def set_budget(self, job_id: str, budget: BudgetInput) -> JobResponse:
        """Another budget for a job: a run that waits for it goes on."""
        return await self._ask(operations.set_budget(job_id, budget))

    async def stop(self, job_id: str) -> RunResponse:
        """Stops the latest run; its `receipt` tells what was let go."""
        return await self._ask(operations.stop(job_id))

    async def pause(self, job_id: str) -> RunResponse:
        return await self._ask(operations.pause(job_id))

    async def resume(self, job_id: str) -> RunResponse:
        return await self._ask(operations.resume(job_id))

    async def rerun(
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
        return await self._ask(
            operations.rerun(job_id, Choice(statuses, reasons, hosts)), idempotency_key
        )

    async def preview_rerun(
        self,
        job_id: str,
        *,
        statuses: Iterable[str] | None = None,
        reasons: Iterable[str] | None = None,
        hosts: Iterable[str] | None = None,
    ) -> RerunDryRunResponse:
        """What a rerun would do and cost; nothing is created."""
        return await self._ask(operations.preview_rerun(job_id, Choice(statuses, reasons, hosts)))

    async def audit(self, job_id: str, *, run_id: str | None = None) -> AuditResponse:
        """A run (the latest, if none is named) recounted from its rows. Reads every row: a large
        run takes a while, and a client with a longer `timeout_s`."""
        run_id = run_id or run_of(await self.get(job_id)).run_id
        return await self._ask(operations.audit(job_id, run_id))

    async def events(self, *, after: str | None = None) -> AsyncGenerator[EventResponse, None]:
        """What happened to the caller's jobs, oldest first, up to now; only what came behind the
        event of this id, if one is named."""
        while True:
            page = await self._ask(operations.list_events(after, limit=EVENTS_PAGE))
            for each in page.events:
                yield each
            if len(page.events) < EVENTS_PAGE:
                return
            after = page.last_id

    async def follow_events(
        self, *, after: str | None = None, interval_s: float = 1.0
    ) -> AsyncGenerator[EventResponse, None]:
        """As `events`, and then each as it comes, for ever. Outages are up to the caller: going
        on behind the last event misses nothing."""
        while True:
            async for event in self.events(after=after):
                yield event
                after = event.id
            await trio.sleep(interval_s)

    async def set_schedule(self, job_id: str, schedule: JobSchedule) -> JobResponse:
        """Replaces the schedule of a scheduled job; a run that is live goes on."""
        return await self._ask(operations.set_schedule(job_id, schedule))

    async def set_schedule_state(
        self, job_id: str, state: Literal["active", "paused"]
    ) -> JobResponse:
        """Pauses or resumes the schedule; times that pass meanwhile make no run."""
        return await self._ask(operations.set_schedule_state(job_id, state))

    async def delete(self, job_id: str) -> None:
        """Deletes a job with everything it made."""
        await self._ask(operations.delete(job_id))

    async def delete_run(self, job_id: str, run_id: str) -> None:
        """Deletes one run and its results."""
        await self._ask(operations.delete_run(job_id, run_id))

    async def results(
        self, job_id: str, *, run_id: str | None = None, status: str | None = None
    ) -> AsyncGenerator[TaskResult, None]:
        """The tasks of a run (the latest, if none is named), page by page; exact once it ended."""
        cursor = None
        while True:
            page = await self._ask(
                operations.list_results(job_id, run_id, status, limit=RESULTS_PAGE, cursor=cursor)
            )
            for each in page.results:
                yield each
            if (cursor := page.next_cursor) is None:
                return

    async def history(
        self, job_id: str, task_id: str, *, run_id: str | None = None
    ) -> tuple[TaskHistoryEvent, ...]:
        """Every try at a task."""
        answer = await self._ask(operations.get_history(job_id, task_id, run_id))
        return tuple(answer.events)

    async def content(self, job_id: str, task_id: str, *, run_id: str | None = None) -> bytes:
        """The body of a task, in memory."""
        call = operations.get_content(job_id, task_id, run_id)
        return await self._content(call)

    async def download(
        self, job_id: str, task_id: str, path: Path, *, run_id: str | None = None
    ) -> Downloaded:
        """The body of a task as a file, which is whole or not there."""
        call = operations.get_content(job_id, task_id, run_id)
        return await self._bodies.save(call, path)

    async def download_all(
        self, job_id: str, paths: Mapping[str, Path], *, run_id: str | None = None
    ) -> dict[str, Downloaded | ApiError]:
        """The bodies of tasks as files, several at a time; an ApiError where there is none."""
        return await self._bodies.save_all(
            {
                task_id: (operations.get_content(job_id, task_id, run_id), path)
                for task_id, path in paths.items()
            }
        )

    async def webhook(self, job_id: str) -> WebhookResponse:
        """The job's webhook; ApiError 404 where there is none."""
        return await self._ask(operations.get_webhook(job_id))

    async def set_webhook(self, job_id: str, webhook: WebhookInput) -> WebhookResponse:
        """Holds for every delivery that has not been made yet."""
        return await self._ask(operations.put_webhook(job_id, webhook))

    async def remove_webhook(self, job_id: str) -> None:
        """Removes the webhook and drops what was not delivered."""
        await self._ask(operations.delete_webhook(job_id))

    async def deliveries(self, job_id: str) -> AsyncGenerator[DeliveryResponse, None]:
        """The job's events, newest first, each with the latest tries at delivering it."""
        cursor = None
        while True:
            page = await self._ask(
                operations.list_deliveries(job_id, limit=JOBS_PAGE, cursor=cursor)
            )
            for each in page.deliveries:
                yield each
            if (cursor := page.next_cursor) is None:
                return

    async def redeliver(self, job_id: str, event_id: str) -> DeliveryResponse:
        """Delivers an event once more: the same id, the same bytes."""
        return await self._ask(operations.redeliver(job_id, event_id))

    async def test_webhook(self, webhook: WebhookInput) -> WebhookTestResponse:
        """Has a test event sent to a receiver, and tells how it took it."""
        return await self._ask(operations.test_webhook(webhook))

    async def hmac_keys(self) -> HmacKeyList:
        """The keys that sign webhooks, without their secrets."""
        return await self._ask(operations.list_hmac_keys())

    async def rotate_hmac_key(self, *, idempotency_key: str | None = None) -> HmacKeyCreated:
        """Makes the first key, or a candidate to follow it. Its secret is shown this once."""
        return await self._ask(operations.rotate_hmac_key(), idempotency_key)

    async def finalize_hmac_key(self) -> HmacKeyFinalized:
        """Makes the candidate the active key."""
        return await self._ask(operations.finalize_hmac_key())

    async def cancel_hmac_rotation(self) -> None:
        """Drops the candidate, if there is one."""
        await self._ask(operations.cancel_hmac_rotation())

    async def start_export(
        self, job_id: str, run_id: str, *, kind: str = "zip", idempotency_key: str | None = None
    ) -> StartExportResponse:
        """Asks for the results of an ended run as one file: zip, jsonl, csv or warc."""
        return await self._ask(operations.start_export(job_id, run_id, kind), idempotency_key)

    async def get_export(self, job_id: str, run_id: str, export_id: str) -> ExportResponse:
        return await self._ask(operations.get_export(job_id, run_id, export_id))

    async def wait_for_export(
        self,
        job_id: str,
        run_id: str,
        export_id: str,
        on_progress: Callable[[ExportResponse], None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> ExportResponse:
        """Looks at an export until it is made, or has failed."""
        pace = PollBackoff(begun_at=trio.current_time(), timeout_s=timeout_s)
        while True:
            export = await self.get_export(job_id, run_id, export_id)
            if on_progress is not None:
                on_progress(export)
            if export.status not in EXPORT_UNDONE:
                return export
            await trio.sleep(pace.interval_s(trio.current_time()))

    async def download_export(
        self, job_id: str, run_id: str, export_id: str, path: Path
    ) -> Downloaded:
        """The file of an export, which is whole or not there."""
        call = operations.get_export_content(job_id, run_id, export_id)
        return await self._stream(call, path)

    async def wait(
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
        run = await self.run(job_id, run_id) if run_id else run_of(await self.get(job_id))
        pace = PollBackoff(begun_at=trio.current_time(), timeout_s=timeout_s)
        while True:
            if on_progress is not None:
                on_progress(run)
            if run.terminal:
                return run
            await trio.sleep(pace.interval_s(trio.current_time()))
            try:
                run = await self.run(job_id, run.run_id)
            except SdkError as error:
                if not pace.sits_out(error, trio.current_time()):
                    raise
            else:
                pace.seen(trio.current_time())
