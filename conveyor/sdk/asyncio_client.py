"""The asyncio client: one method for each operation of the API.

`make docs` writes this file from trio_client.py. Do not change it by hand.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from conveyor.domain.lifecycle import EXPORT_UNDONE
from conveyor.schemas.crawl import (
    CrawlPageResponse,
    CrawlResponse,
    CrawlResultResponse,
    StopCrawlResponse,
)
from conveyor.schemas.requests import (
    BudgetInput,
    CreateJobInputRequest,
    DestinationInput,
    WebhookInput,
)
from conveyor.schemas.responses import (
    AddTasksResponse,
    AuditResponse,
    DeliveryResponse,
    EventResponse,
    ExportResponse,
    HmacKeyCreated,
    HmacKeyFinalized,
    HmacKeyList,
    JobResponse,
    ListResultsResponse,
    RerunDryRunResponse,
    RerunJobResponse,
    ResultStatus,
    RunResponse,
    StartExportResponse,
    SubmitDryRunResponse,
    SubmitJobResponse,
    TaskHistoryEvent,
    TaskResult,
    WebhookResponse,
    WebhookTestResponse,
)
from conveyor.schemas.schedule import JobSchedule
from conveyor.sdk import operations
from conveyor.sdk.asyncio_connection import AsyncioConnection
from conveyor.sdk.downloads import Downloaded
from conveyor.sdk.errors import ApiError, PollBackoff, SdkError, run_of
from conveyor.sdk.notebook import frame_of
from conveyor.sdk.operations import Choice, CrawlLike, JobLike, TaskLike

if TYPE_CHECKING:
    from pandas import DataFrame

# Tasks that have not ended.
UNDONE = frozenset({ResultStatus.PENDING, ResultStatus.PROCESSING})
# Rows of one page: larger pages need fewer requests and more memory.
JOBS_PAGE = 100
RESULTS_PAGE = 500
EVENTS_PAGE = 500


class AsyncioClient(AsyncioConnection):
    """A client of one server.

    Every method raises ApiError if the server refuses the request, Unreachable if no server
    answers, and BadId for a text that cannot be an id. The server executes a POST once, even if the
    client sends it several times, because each POST has an Idempotency-Key. With
    `idempotency_key`, the program chooses the key and can repeat the call after its own crash.

    One client may be shared among tasks or threads.
    """

    async def submit(
        self, job: JobLike, *, idempotency_key: str | None = None
    ) -> SubmitJobResponse:
        """Submits a job: a list of URLs or tasks, one URL, or all fields of a job.

        Tasks and jobs may be structs or dicts. Raises ValueError for what is neither.
        """
        return await self._ask(operations.submit(job), idempotency_key)

    async def preview(self, job: JobLike) -> SubmitDryRunResponse:
        """Returns the effect and the cost of a submit. The server creates nothing."""
        return await self._ask(operations.preview(job))

    async def upload(self, path: Path, request: CreateJobInputRequest | None = None) -> str:
        """Uploads a list and returns its `file_input_id` for `submit`.

        The list is text with one URL per line, unless `request` describes another format.
        """
        slot = await self._ask(
            operations.create_input(request or CreateJobInputRequest(format="text"))
        )
        await self._put_file(slot.upload, path)
        return slot.file_input_id

    async def add_tasks(
        self,
        job_id: str,
        tasks: TaskLike | Iterable[TaskLike],
        *,
        last: bool = False,
        idempotency_key: str | None = None,
    ) -> AddTasksResponse:
        """Adds a list to an open job. With `last`, the job is closed after it."""
        return await self._ask(operations.add_tasks(job_id, tasks, last=last), idempotency_key)

    async def close(self, job_id: str) -> JobResponse:
        """Closes an open job. Its run ends when all its tasks are done."""
        return await self._ask(operations.close(job_id))

    async def get(self, job_id: str) -> JobResponse:
        return await self._ask(operations.get(job_id))

    async def list(self, *, status: str | None = None) -> AsyncGenerator[JobResponse, None]:
        """Yields the caller's jobs, newest first. It requests the next page when it is needed."""
        cursor = None
        while True:
            page = await self._ask(operations.list_jobs(status, limit=JOBS_PAGE, cursor=cursor))
            for job in page.jobs:
                yield job
            if (cursor := page.next_cursor) is None:
                return

    async def runs(self, job_id: str) -> AsyncGenerator[RunResponse, None]:
        """Yields the runs of a job, newest first."""
        cursor = None
        while True:
            page = await self._ask(operations.list_runs(job_id, limit=JOBS_PAGE, cursor=cursor))
            for run in page.runs:
                yield run
            if (cursor := page.next_cursor) is None:
                return

    async def run(self, job_id: str, run_id: str) -> RunResponse:
        return await self._ask(operations.get_run(job_id, run_id))

    async def set_budget(self, job_id: str, budget: BudgetInput) -> JobResponse:
        """Changes the budget of a job. A run that waits for its budget continues."""
        return await self._ask(operations.set_budget(job_id, budget))

    async def stop(self, job_id: str) -> RunResponse:
        """Stops the latest run. The `receipt` of the run lists what was released."""
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
        """Runs all tasks again, or only the tasks that match all given filters.

        The filters are `statuses`, failure `reasons` and `hosts`. The new run inherits the results
        of the other tasks.
        """
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
        """Returns the effect and the cost of a rerun. The server creates nothing."""
        return await self._ask(operations.preview_rerun(job_id, Choice(statuses, reasons, hosts)))

    async def audit(self, job_id: str, *, run_id: str | None = None) -> AuditResponse:
        """Recounts a run, by default the latest, from its rows.

        The server reads every row, so a large run needs a client with a longer `timeout_s`.
        """
        run_id = run_id or run_of(await self.get(job_id)).run_id
        return await self._ask(operations.audit(job_id, run_id))

    async def events(self, *, after: str | None = None) -> AsyncGenerator[EventResponse, None]:
        """Yields the events of the caller's jobs until now, oldest first.

        With `after`, it yields only the events after the event with this id.
        """
        while True:
            page = await self._ask(operations.list_events(after, limit=EVENTS_PAGE))
            for event in page.events:
                yield event
            if len(page.events) < EVENTS_PAGE:
                return
            after = page.last_id

    async def follow_events(
        self, *, after: str | None = None, interval_s: float = 1.0
    ) -> AsyncGenerator[EventResponse, None]:
        """As `events`, and then yields each new event, without end.

        An outage raises an error. The program can continue with the id of the last event as
        `after` and misses no event.
        """
        while True:
            async for event in self.events(after=after):
                yield event
                after = event.id
            await self._sleep(interval_s)

    async def set_schedule(self, job_id: str, schedule: JobSchedule) -> JobResponse:
        """Replaces the schedule of a scheduled job. A live run continues."""
        return await self._ask(operations.set_schedule(job_id, schedule))

    async def set_schedule_state(
        self, job_id: str, state: Literal["active", "paused"]
    ) -> JobResponse:
        """Pauses or resumes the schedule. Nominal times during a pause start no run."""
        return await self._ask(operations.set_schedule_state(job_id, state))

    async def delete(self, job_id: str) -> None:
        """Deletes a job with all its runs and results."""
        await self._ask(operations.delete(job_id))

    async def delete_run(self, job_id: str, run_id: str) -> None:
        """Deletes one run and its results."""
        await self._ask(operations.delete_run(job_id, run_id))

    async def results(
        self,
        job_id: str,
        *,
        run_id: str | None = None,
        status: str | None = None,
        order: str = "id",
    ) -> AsyncGenerator[TaskResult, None]:
        """Yields the tasks of a run, by default the latest, page by page.

        The order is that of the task ids, or with `list` that of the submitted lines, for runs of
        up to 20,000 tasks. While the run is live, tasks may change between two pages.
        """
        cursor = None
        while True:
            page = await self.results_page(
                job_id, run_id=run_id, status=status, order=order, cursor=cursor
            )
            for result in page.results:
                yield result
            if (cursor := page.next_cursor) is None:
                return

    async def results_page(
        self,
        job_id: str,
        *,
        run_id: str | None = None,
        status: str | None = None,
        order: str = "id",
        limit: int = RESULTS_PAGE,
        cursor: str | None = None,
    ) -> ListResultsResponse:
        """Returns one page of `results`. Its `next_cursor` is the `cursor` of the next page."""
        return await self._ask(
            operations.list_results(job_id, run_id, status, order=order, limit=limit, cursor=cursor)
        )

    async def history(
        self, job_id: str, task_id: str, *, run_id: str | None = None
    ) -> tuple[TaskHistoryEvent, ...]:
        """Returns the attempts at a task."""
        answer = await self._ask(operations.get_history(job_id, task_id, run_id))
        return tuple(answer.events)

    async def content(self, job_id: str, task_id: str, *, run_id: str | None = None) -> bytes:
        """Returns the body of a task in memory."""
        call = operations.get_content(job_id, task_id, run_id)
        return await self._content(call)

    async def download(
        self, job_id: str, task_id: str, path: Path, *, run_id: str | None = None
    ) -> Downloaded:
        """Saves the body of a task as a file. The file is complete or does not exist."""
        call = operations.get_content(job_id, task_id, run_id)
        return await self._save(call, path)

    async def download_all(
        self, job_id: str, paths: Mapping[str, Path], *, run_id: str | None = None
    ) -> dict[str, Downloaded | ApiError]:
        """Saves the bodies of tasks as files, several at a time. A missing body has an ApiError.

        The synchronous client starts an event loop for it, so it must not be called inside one.
        """
        return await self._save_all(
            {
                task_id: (operations.get_content(job_id, task_id, run_id), path)
                for task_id, path in paths.items()
            }
        )

    async def submit_crawl(
        self, crawl: CrawlLike, *, idempotency_key: str | None = None
    ) -> CrawlResponse:
        """Starts a crawl: the URL of its first page, or all fields as a dict or a struct.

        Its `crawl_id` is also the id of the job that fetches its pages.
        """
        return await self._ask(operations.submit_crawl(crawl), idempotency_key)

    async def crawl(
        self, crawl_id: str, *, limit: int = RESULTS_PAGE, cursor: str | None = None
    ) -> CrawlPageResponse:
        """Returns a crawl with one page of the pages that it kept."""
        return await self._ask(operations.get_crawl(crawl_id, limit=limit, cursor=cursor))

    async def crawls(self) -> AsyncGenerator[CrawlResponse, None]:
        """Yields the caller's crawls, newest first."""
        cursor = None
        while True:
            page = await self._ask(operations.list_crawls(limit=JOBS_PAGE, cursor=cursor))
            for crawl in page.crawls:
                yield crawl
            if (cursor := page.next_cursor) is None:
                return

    async def crawl_results(
        self, crawl_id: str, *, timeout_s: float | None = None
    ) -> AsyncGenerator[CrawlResultResponse, None]:
        """Yields each page that a crawl keeps, until the crawl has ended.

        Raises TimeoutError after `timeout_s`.
        """
        pace = PollBackoff(begun_at=self._now_s(), timeout_s=timeout_s)
        cursor = None
        while True:
            page = await self.crawl(crawl_id, cursor=cursor)
            for result in page.results:
                yield result
            if page.next_cursor is None:
                return
            if page.next_cursor == cursor or not page.results:
                await self._sleep(pace.interval_s(self._now_s()))
            cursor = page.next_cursor

    async def stop_crawl(self, crawl_id: str) -> StopCrawlResponse:
        """Stops a crawl. The pages that it kept stay readable."""
        return await self._ask(operations.stop_crawl(crawl_id))

    async def webhook(self, job_id: str) -> WebhookResponse:
        """Returns the webhook of a job. Raises ApiError 404 if there is none."""
        return await self._ask(operations.get_webhook(job_id))

    async def set_webhook(self, job_id: str, webhook: WebhookInput) -> WebhookResponse:
        """Sets the webhook of a job. It applies to every delivery that is still due."""
        return await self._ask(operations.put_webhook(job_id, webhook))

    async def remove_webhook(self, job_id: str) -> None:
        """Removes the webhook and drops its undelivered events."""
        await self._ask(operations.delete_webhook(job_id))

    async def deliveries(self, job_id: str) -> AsyncGenerator[DeliveryResponse, None]:
        """Yields the webhook events of a job, newest first, with their latest delivery attempts."""
        cursor = None
        while True:
            page = await self._ask(
                operations.list_deliveries(job_id, limit=JOBS_PAGE, cursor=cursor)
            )
            for delivery in page.deliveries:
                yield delivery
            if (cursor := page.next_cursor) is None:
                return

    async def redeliver(self, job_id: str, event_id: str) -> DeliveryResponse:
        """Delivers an event again, with the same id and the same bytes."""
        return await self._ask(operations.redeliver(job_id, event_id))

    async def test_webhook(self, webhook: WebhookInput) -> WebhookTestResponse:
        """Makes the server send a test event to a receiver, and returns the result."""
        return await self._ask(operations.test_webhook(webhook))

    async def hmac_keys(self) -> HmacKeyList:
        """Returns the keys that sign webhooks, without their secrets."""
        return await self._ask(operations.list_hmac_keys())

    async def rotate_hmac_key(self, *, idempotency_key: str | None = None) -> HmacKeyCreated:
        """Creates the first key, or a candidate for the next one. The secret is shown only once."""
        return await self._ask(operations.rotate_hmac_key(), idempotency_key)

    async def finalize_hmac_key(self) -> HmacKeyFinalized:
        """Makes the candidate the active key."""
        return await self._ask(operations.finalize_hmac_key())

    async def cancel_hmac_rotation(self) -> None:
        """Drops the candidate, if there is one."""
        await self._ask(operations.cancel_hmac_rotation())

    async def start_export(
        self,
        job_id: str,
        run_id: str,
        *,
        kind: str = "zip",
        order: str = "id",
        destination: DestinationInput | None = None,
        idempotency_key: str | None = None,
    ) -> StartExportResponse:
        """Starts an export of an ended run as one file: zip, jsonl, csv, warc or parquet. With the
        order `list`, its tasks are in the order in which they were submitted. The file is put to
        the destination, if there is one."""
        call = operations.start_export(job_id, run_id, kind, order, destination)
        return await self._ask(call, idempotency_key)

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
        """Waits until an export is complete or has failed."""
        pace = PollBackoff(begun_at=self._now_s(), timeout_s=timeout_s)
        while True:
            export = await self.get_export(job_id, run_id, export_id)
            if on_progress is not None:
                on_progress(export)
            if export.status not in EXPORT_UNDONE:
                return export
            await self._sleep(pace.interval_s(self._now_s()))

    async def download_export(
        self, job_id: str, run_id: str, export_id: str, path: Path
    ) -> Downloaded:
        """Saves the file of an export. The file is complete or does not exist."""
        call = operations.get_export_content(job_id, run_id, export_id)
        return await self._save_large(call, path)

    async def wait(
        self,
        job_id: str,
        on_progress: Callable[[RunResponse], None] | None = None,
        *,
        run_id: str | None = None,
        timeout_s: float | None = None,
    ) -> RunResponse:
        """Waits until a run, by default the latest, has ended.

        It tolerates an outage of up to half a minute. It raises TimeoutError after `timeout_s`. The
        run of an open job ends only after the job is closed.
        """
        run = await self.run(job_id, run_id) if run_id else run_of(await self.get(job_id))
        pace = PollBackoff(begun_at=self._now_s(), timeout_s=timeout_s)
        while True:
            if on_progress is not None:
                on_progress(run)
            if run.terminal:
                return run
            run = await self._poll(run, pace)

    async def as_completed(
        self, job_id: str, *, run_id: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[TaskResult, None]:
        """Yields each task of a run, by default the latest, once it has ended, until the run has.

        While the run is live, a task appears when a tenth more tasks than before have ended, or
        when no further task ends: each look reads all results, and so costs the server few
        requests. It tolerates outages and raises TimeoutError, as `wait` does.
        """
        run = await self.run(job_id, run_id) if run_id else run_of(await self.get(job_id))
        pace = PollBackoff(begun_at=self._now_s(), timeout_s=timeout_s)
        completed_before = 0
        task_ids: set[str] = set()
        while True:
            completed = run.stats.completed
            is_due = completed == completed_before or completed >= 1.1 * len(task_ids)
            if run.terminal or (is_due and completed > len(task_ids)):
                async for result in self.results(job_id, run_id=run.run_id):
                    if result.status not in UNDONE and result.task_id not in task_ids:
                        task_ids.add(result.task_id)
                        yield result
            if run.terminal:
                return
            completed_before = completed
            run = await self._poll(run, pace)

    async def frame(
        self, job_id: str, *, run_id: str | None = None, status: str | None = None
    ) -> DataFrame:
        """Returns `results` as a pandas DataFrame: one row for each task, in list order."""
        results = [result async for result in self.results(job_id, run_id=run_id, status=status)]
        return frame_of(results)

    async def _poll(self, run: RunResponse, pace: PollBackoff) -> RunResponse:
        """Returns the run after a pause, or during a short outage the same as before."""
        await self._sleep(pace.interval_s(self._now_s()))
        try:
            run = await self.run(run.job_id, run.run_id)
        except SdkError as error:
            if not pace.tolerates(error, self._now_s()):
                raise
        else:
            pace.record_success(self._now_s())
        return run
