"""Every call of the API as a value: what to send and what comes back, and nothing of how.

Clients differ in how they wait; what they say to the server is on this page, once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from conveyor.sdk.errors import UNEXPECTED, ApiError, BadId, error_from
from conveyor.wire.limits import BudgetInput
from conveyor.wire.requests import SubmitJobRequest, TaskInput
from conveyor.wire.responses import (
    AddTasksResponse,
    JobResponse,
    ListJobRunsResponse,
    ListJobsResponse,
    ListResultsResponse,
    RerunJobResponse,
    RunResponse,
    SubmitJobResponse,
    TaskHistoryResponse,
)

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the type of its answer."""

    method: str
    path: str
    answer: type[T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def read(self, status: int, headers: Mapping[str, str], content: bytes) -> T:
        """The answer; ApiError for anything else."""
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


def submit(job: SubmitJobRequest | Iterable[str]) -> Call[SubmitJobResponse]:
    if not isinstance(job, SubmitJobRequest):
        job = SubmitJobRequest(tasks=tasks_of(job))
    body = _lean(job)
    if job.tasks is not None:
        body["tasks"] = [_lean(task) for task in job.tasks]
    return Call("POST", "/v1/jobs", SubmitJobResponse, body=msgspec.json.encode(body))


def add_tasks(
    job_id: str, tasks: Iterable[str | TaskInput], *, last: bool
) -> Call[AddTasksResponse]:
    body = {"tasks": [_lean(task) for task in tasks_of(tasks)], "last_batch": last}
    path = _path(job_id, "tasks")
    return Call("POST", path, AddTasksResponse, body=msgspec.json.encode(body))


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


def rerun(job_id: str, statuses: Iterable[str] | None) -> Call[RerunJobResponse]:
    query = {} if statuses is None else {"status": ",".join(statuses)}
    return Call("POST", _path(job_id, "rerun"), RerunJobResponse, query)


def list_results(
    job_id: str, run_id: str | None, status: str | None, *, limit: int, cursor: str | None
) -> Call[ListResultsResponse]:
    path = _run_path(job_id, run_id, "results")
    return Call("GET", path, ListResultsResponse, _query(status, limit, cursor))


def get_history(job_id: str, task_id: str, run_id: str | None) -> Call[TaskHistoryResponse]:
    path = _run_path(job_id, run_id, "tasks", _checked(task_id, "task"), "history")
    return Call("GET", path, TaskHistoryResponse)


def get_content(job_id: str, task_id: str, run_id: str | None) -> Call[None]:
    """The answer is the body itself, whatever it is."""
    path = _run_path(job_id, run_id, "tasks", _checked(task_id, "task"), "content")
    return Call("GET", path, type(None))


def tasks_of(tasks: Iterable[str | TaskInput]) -> list[TaskInput]:
    return [TaskInput(url=task) if isinstance(task, str) else task for task in tasks]


def _path(job_id: str, *rest: str) -> str:
    return "/".join(("/v1/jobs", _checked(job_id, "job"), *rest))


def _run_path(job_id: str, run_id: str | None, *rest: str) -> str:
    """Without a run, the same path means the latest one."""
    if run_id is None:
        return _path(job_id, *rest)
    return _path(job_id, "runs", _checked(run_id, "run"), *rest)


def _checked(text: str, what: str) -> str:
    """Only ids get into a path: with a slash or dots in it, it would be another path."""
    if _ID.match(text) is None:
        raise BadId(f"{text[:80]!r} is not the id of a {what}.")
    return text


def _query(status: str | None, limit: int, cursor: str | None) -> dict[str, str]:
    given = {"status": status, "limit": str(limit), "cursor": cursor}
    return {name: value for name, value in given.items() if value is not None}


def _lean(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields that say something: a list of a million lines carries no nulls."""
    pairs = ((name, getattr(struct, name), default) for name, default in _defaults(type(struct)))
    return {name: value for name, value, default in pairs if value != default}


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))
