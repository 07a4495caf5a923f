"""Every operation of the API as a value: the request and the type of its response, without I/O.

The clients differ only in how they send and wait, so they share this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from conveyor.schemas.crawl import (
    CrawlPageResponse,
    CrawlResponse,
    CreateCrawlRequest,
    ListCrawlsResponse,
    StopCrawlResponse,
)
from conveyor.schemas.requests import (
    BudgetInput,
    CreateJobInputRequest,
    DestinationInput,
    StartExportRequest,
    SubmitJobRequest,
    TaskInput,
    WebhookInput,
)
from conveyor.schemas.responses import (
    AddTasksResponse,
    AuditResponse,
    CreateJobInputResponse,
    DeliveryResponse,
    ExportResponse,
    HmacKeyCreated,
    HmacKeyFinalized,
    HmacKeyList,
    JobResponse,
    ListDeliveriesResponse,
    ListEventsResponse,
    ListJobRunsResponse,
    ListJobsResponse,
    ListResultsResponse,
    RerunDryRunResponse,
    RerunJobResponse,
    RunResponse,
    StartExportResponse,
    SubmitDryRunResponse,
    SubmitJobResponse,
    TaskHistoryResponse,
    WebhookResponse,
    WebhookTestResponse,
)
from conveyor.schemas.schedule import JobSchedule, UpdateScheduleStateRequest
from conveyor.sdk.errors import UNEXPECTED, ApiError, BadId, error_from

T = TypeVar("T")
# A line of a list: a URL, or a task as a struct or as a dict with the same fields.
TaskLike = str | TaskInput | Mapping[str, Any]
# A job as a struct or as a dict with the same fields, or its list, or its one URL.
JobLike = SubmitJobRequest | TaskLike | Iterable[TaskLike]
# A crawl as a struct or as a dict with the same fields, or the URL that it starts from.
CrawlLike = CreateCrawlRequest | Mapping[str, Any] | str

_DRY = {"dry_run": "true"}
_REDIRECT = {"redirect": "true"}
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Choice:
    """The tasks that a rerun starts over: those that match all filters. None matches every task."""

    statuses: Iterable[str] | None = None
    reasons: Iterable[str] | None = None
    hosts: Iterable[str] | None = None

    def query(self) -> dict[str, str]:
        query = {"status": self.statuses, "reason": self.reasons, "host": self.hosts}
        return {name: ",".join(texts) for name, texts in query.items() if texts is not None}


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the type of its response."""

    method: str
    path: str
    answer: type[T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def read(self, status: int, headers: Mapping[str, str], content: bytes) -> T:
        """Decodes the response. Raises ApiError for an error or an unexpected response."""
        if not 200 <= status < 300:
            raise error_from(status, headers, content)
        if self.answer is type(None):
            return None
        try:
            return msgspec.json.decode(content, type=self.answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ApiError(
                status,
                UNEXPECTED,
                "Unexpected answer",
                "The answer is not one that Conveyor gives.",
                request_id=headers.get("x-request-id"),
            ) from None


def submit(job: JobLike) -> Call[SubmitJobResponse]:
    job = _job_of(job)
    body = _lean(job)
    if job.tasks is not None:
        body["tasks"] = [_lean(task) for task in job.tasks]
    return Call("POST", "/v1/jobs", SubmitJobResponse, body=msgspec.json.encode(body))


def preview(job: JobLike) -> Call[SubmitDryRunResponse]:
    real = submit(job)
    return Call(real.method, real.path, SubmitDryRunResponse, _DRY, real.body)


def add_tasks(
    job_id: str, tasks: TaskLike | Iterable[TaskLike], *, last: bool
) -> Call[AddTasksResponse]:
    body = {"tasks": [_lean(task) for task in tasks_of(tasks)], "last_batch": last}
    path = _path(job_id, "tasks")
    return Call("POST", path, AddTasksResponse, body=msgspec.json.encode(body))


def create_input(request: CreateJobInputRequest) -> Call[CreateJobInputResponse]:
    body = msgspec.json.encode(_without_nulls(msgspec.to_builtins(request)))
    return Call("POST", "/v1/job_inputs", CreateJobInputResponse, body=body)


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}


def close(job_id: str) -> Call[JobResponse]:
    return Call("POST", _path(job_id, "close"), JobResponse)


def get(job_id: str) -> Call[JobResponse]:
    return Call("GET", _path(job_id), JobResponse)


def delete(job_id: str) -> Call[None]:
    return Call("DELETE", _path(job_id), type(None))


def list_jobs(status: str | None, *, limit: int, cursor: str | None) -> Call[ListJobsResponse]:
    return Call("GET", "/v1/jobs", ListJobsResponse, _query(status, limit, cursor))


def list_runs(job_id: str, *, limit: int, cursor: str | None) -> Call[ListJobRunsResponse]:
    query = _query(None, limit, cursor)
    return Call("GET", _path(job_id, "runs"), ListJobRunsResponse, query)


def get_run(job_id: str, run_id: str) -> Call[RunResponse]:
    return Call("GET", _run_path(job_id, run_id), RunResponse)


def delete_run(job_id: str, run_id: str) -> Call[None]:
    return Call("DELETE", _run_path(job_id, run_id), type(None))


def set_budget(job_id: str, budget: BudgetInput) -> Call[JobResponse]:
    return Call("PUT", _path(job_id, "budget"), JobResponse, body=msgspec.json.encode(budget))


def stop(job_id: str) -> Call[RunResponse]:
    return Call("POST", _path(job_id, "stop"), RunResponse)


def pause(job_id: str) -> Call[RunResponse]:
    return Call("POST", _path(job_id, "pause"), RunResponse)


def resume(job_id: str) -> Call[RunResponse]:
    return Call("POST", _path(job_id, "resume"), RunResponse)


def rerun(job_id: str, choice: Choice) -> Call[RerunJobResponse]:
    return Call("POST", _path(job_id, "rerun"), RerunJobResponse, choice.query())


def preview_rerun(job_id: str, choice: Choice) -> Call[RerunDryRunResponse]:
    query = {**choice.query(), **_DRY}
    return Call("POST", _path(job_id, "rerun"), RerunDryRunResponse, query)


def audit(job_id: str, run_id: str) -> Call[AuditResponse]:
    return Call("GET", _run_path(job_id, run_id, "audit"), AuditResponse)


def list_events(after: str | None, *, limit: int) -> Call[ListEventsResponse]:
    query = {"limit": str(limit)} | ({} if after is None else {"after": after})
    return Call("GET", "/v1/events", ListEventsResponse, query)


def set_schedule(job_id: str, schedule: JobSchedule) -> Call[JobResponse]:
    body = msgspec.json.encode(schedule)
    return Call("PUT", _path(job_id, "schedule"), JobResponse, body=body)


def set_schedule_state(job_id: str, state: Literal["active", "paused"]) -> Call[JobResponse]:
    body = msgspec.json.encode(UpdateScheduleStateRequest(schedule_state=state))
    return Call("POST", _path(job_id, "schedule", "state"), JobResponse, body=body)


def list_results(
    job_id: str,
    run_id: str | None,
    status: str | None,
    *,
    order: str,
    limit: int,
    cursor: str | None,
) -> Call[ListResultsResponse]:
    path = _run_path(job_id, run_id, "results")
    query = _query(status, limit, cursor)
    if order != "id":
        query["order"] = order
    return Call("GET", path, ListResultsResponse, query)


def get_history(job_id: str, task_id: str, run_id: str | None) -> Call[TaskHistoryResponse]:
    path = _run_path(job_id, run_id, "tasks", _check_text(task_id, "task"), "history")
    return Call("GET", path, TaskHistoryResponse)


def get_content(job_id: str, task_id: str, run_id: str | None) -> Call[None]:
    """The response is the stored body, of any type."""
    path = _run_path(job_id, run_id, "tasks", _check_text(task_id, "task"), "content")
    return Call("GET", path, type(None), _REDIRECT)


def get_webhook(job_id: str) -> Call[WebhookResponse]:
    return Call("GET", _path(job_id, "webhook"), WebhookResponse)


def put_webhook(job_id: str, webhook: WebhookInput) -> Call[WebhookResponse]:
    body = msgspec.json.encode(webhook)
    return Call("PUT", _path(job_id, "webhook"), WebhookResponse, body=body)


def delete_webhook(job_id: str) -> Call[None]:
    return Call("DELETE", _path(job_id, "webhook"), type(None))


def list_deliveries(job_id: str, *, limit: int, cursor: str | None) -> Call[ListDeliveriesResponse]:
    path = _path(job_id, "webhook", "deliveries")
    return Call("GET", path, ListDeliveriesResponse, _query(None, limit, cursor))


def redeliver(job_id: str, event_id: str) -> Call[DeliveryResponse]:
    path = _path(job_id, "webhook", "deliveries", _check_text(event_id, "event"), "redeliver")
    return Call("POST", path, DeliveryResponse)


def test_webhook(webhook: WebhookInput) -> Call[WebhookTestResponse]:
    body = msgspec.json.encode(webhook)
    return Call("POST", "/v1/webhook/test", WebhookTestResponse, body=body)


def list_hmac_keys() -> Call[HmacKeyList]:
    return Call("GET", "/v1/hmac/keys", HmacKeyList)


def rotate_hmac_key() -> Call[HmacKeyCreated]:
    return Call("POST", "/v1/hmac/keys/rotate", HmacKeyCreated)


def finalize_hmac_key() -> Call[HmacKeyFinalized]:
    return Call("POST", "/v1/hmac/keys/rotate/finalize", HmacKeyFinalized)


def cancel_hmac_rotation() -> Call[None]:
    return Call("DELETE", "/v1/hmac/keys/rotate", type(None))


def start_export(
    job_id: str,
    run_id: str,
    kind: str,
    order: str = "id",
    destination: DestinationInput | None = None,
) -> Call[StartExportResponse]:
    path = _run_path(job_id, run_id, "exports")
    query = {"format": kind, "order": order}
    if destination is None:
        return Call("POST", path, StartExportResponse, query)
    body = msgspec.json.encode(StartExportRequest(destination=destination))
    return Call("POST", path, StartExportResponse, query, body=body)


def get_export(job_id: str, run_id: str, export_id: str) -> Call[ExportResponse]:
    path = _run_path(job_id, run_id, "exports", _check_text(export_id, "export"))
    return Call("GET", path, ExportResponse)


def get_export_content(job_id: str, run_id: str, export_id: str) -> Call[None]:
    """The response is the file."""
    path = _run_path(job_id, run_id, "exports", _check_text(export_id, "export"), "content")
    return Call("GET", path, type(None), _REDIRECT)


def submit_crawl(crawl: CrawlLike) -> Call[CrawlResponse]:
    if isinstance(crawl, str):
        crawl = CreateCrawlRequest(url=crawl)
    if isinstance(crawl, Mapping):
        crawl = _from_dict(crawl, CreateCrawlRequest)
    return Call("POST", "/v1/crawls", CrawlResponse, body=msgspec.json.encode(_lean(crawl)))


def get_crawl(crawl_id: str, *, limit: int, cursor: str | None) -> Call[CrawlPageResponse]:
    path = f"/v1/crawls/{_check_text(crawl_id, 'crawl')}"
    return Call("GET", path, CrawlPageResponse, _query(None, limit, cursor))


def list_crawls(*, limit: int, cursor: str | None) -> Call[ListCrawlsResponse]:
    return Call("GET", "/v1/crawls", ListCrawlsResponse, _query(None, limit, cursor))


def stop_crawl(crawl_id: str) -> Call[StopCrawlResponse]:
    return Call("POST", f"/v1/crawls/{_check_text(crawl_id, 'crawl')}/stop", StopCrawlResponse)


def tasks_of(tasks: TaskLike | Iterable[TaskLike]) -> list[TaskInput]:
    """Raises ValueError for what is no task. A lone URL is one task, not a list of characters."""
    if isinstance(tasks, (str, TaskInput, Mapping)):
        tasks = (tasks,)
    return [_task_of(task) for task in tasks]


def _task_of(task: TaskLike) -> TaskInput:
    if isinstance(task, str):
        return TaskInput(url=task)
    return task if isinstance(task, TaskInput) else _from_dict(task, TaskInput)


def _job_of(job: JobLike) -> SubmitJobRequest:
    if isinstance(job, SubmitJobRequest):
        return job
    if isinstance(job, Mapping) and "url" not in job:
        fields = {name: value for name, value in job.items() if name != "tasks"}
        lines = job.get("tasks")
        request = _from_dict(fields, SubmitJobRequest)
        return request if lines is None else replace(request, tasks=tasks_of(lines))
    return SubmitJobRequest(tasks=tasks_of(job))


def _from_dict(fields: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.json.decode(msgspec.json.encode(dict(fields)), type=kind)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"This is no {kind.__name__}: {error}") from None


def _path(job_id: str, *rest: str) -> str:
    return "/".join(("/v1/jobs", _check_text(job_id, "job"), *rest))


def _run_path(job_id: str, run_id: str | None, *rest: str) -> str:
    """Returns the path for a run. Without a run id, it means the latest run."""
    if run_id is None:
        return _path(job_id, *rest)
    return _path(job_id, "runs", _check_text(run_id, "run"), *rest)


def _check_text(text: str, what: str) -> str:
    """Refuses a text that is no id: with a slash or dots, it would change the path."""
    if _ID.match(text) is None:
        raise BadId(f"{text[:80]!r} is not the id of a {what}.")
    return text


def _query(status: str | None, limit: int, cursor: str | None) -> dict[str, str]:
    query = {"status": status, "limit": str(limit), "cursor": cursor}
    return {name: value for name, value in query.items() if value is not None}


def _lean(struct: msgspec.Struct) -> dict[str, Any]:
    """Returns the fields without defaults, so that a list of a million lines has no nulls."""
    pairs = ((name, getattr(struct, name), default) for name, default in _defaults(type(struct)))
    return {name: value for name, value, default in pairs if value != default}


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))
