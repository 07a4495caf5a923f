"""The route table: what the application registers, and what the OpenAPI document describes."""

from __future__ import annotations

from conveyor.api import audits, events, jobs, ops, results, runs
from conveyor.api.route import DRY_RUN, Access, Parameter, Reads, Route, Writes
from conveyor.domain import limits
from conveyor.domain.model import FailureReason, JobStatus, TaskStatus
from conveyor.usecases.results import FILTERS
from conveyor.wire import requests
from conveyor.wire import responses as shapes

_STATUSES = "|".join(TaskStatus)
CURSOR = Parameter(
    "cursor", {"type": "string", "minLength": 1}, "The `next_cursor` of the page before."
)
LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": limits.LIST_ROWS_MAX, "default": limits.LIST_ROWS},
    "How many to answer with at most.",
)
ROWS = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": limits.PAGE_ROWS_MAX, "default": limits.PAGE_ROWS},
    "How many to answer with at most.",
)
RESULT_STATUS = Parameter(
    "status",
    {"type": "string", "enum": list(FILTERS), "default": "all"},
    "Only tasks like these; `processing` are all that have not ended.",
)
JOB_STATUS = Parameter("status", {"type": "string", "enum": list(JobStatus)}, "Only such jobs.")
JOB_TYPE = Parameter("type", {"type": "string", "enum": sorted(jobs.TYPES)}, "Only such jobs.")
RETRY = Parameter(
    "status",
    {"type": "string", "pattern": rf"^({_STATUSES})(,({_STATUSES}))*$"},
    f"Start only these over and inherit the rest: a comma-separated list of "
    f"{', '.join(TaskStatus)}.",
)
REASON = Parameter(
    "reason",
    {"type": "string"},
    f"Of those, only tasks that failed so: a comma-separated list of {', '.join(FailureReason)}.",
)
HOST = Parameter(
    "host", {"type": "string"}, "Of those, only tasks of these hosts, separated by commas."
)
AFTER = Parameter(
    "after",
    {"type": "string"},
    "Only events behind this one, or `latest` for what comes from now on.",
)
EVENTS = Parameter(
    "limit",
    {
        "type": "integer",
        "minimum": 1,
        "maximum": limits.EVENT_ROWS_MAX,
        "default": limits.EVENT_ROWS,
    },
    "How many to answer with at most.",
)
TOKEN = Parameter("token", {"type": "string"}, "From a `result_url`; stands in for the API key.")

_JOB = "/v1/jobs/{job_id}"
_RUN = _JOB + "/runs/{run_id}"

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/jobs",
        name="submitJob",
        tag="jobs",
        summary="Submit a job",
        does=Writes(jobs.submit, requests.SubmitJobRequest),
        answers={
            200: shapes.SubmitDryRunResponse,
            201: shapes.SubmitJobResponse,
            202: shapes.SubmitJobResponse,
        },
        problems=(400, 409, 413, 415, 501, 503),
        query=(DRY_RUN,),
        gives={"job_id": "/job_id", "run_id": "/latest_run/run_id"},
    ),
    Route(
        method="GET",
        path="/v1/jobs",
        name="listJobs",
        tag="jobs",
        summary="List your jobs, newest first",
        does=Reads(jobs.list_jobs),
        answers={200: shapes.ListJobsResponse},
        problems=(400,),
        query=(JOB_STATUS, JOB_TYPE, LIMIT, CURSOR),
    ),
    Route(
        method="GET",
        path=_JOB,
        name="getJob",
        tag="jobs",
        summary="Show a job and its latest run",
        does=Reads(jobs.get_job),
        answers={200: shapes.JobResponse},
        problems=(404,),
    ),
    Route(
        method="DELETE",
        path=_JOB,
        name="deleteJob",
        tag="jobs",
        summary="Delete a job with everything it made",
        does=Writes(jobs.delete_job),
        answers={202: None},
        problems=(404, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/tasks",
        name="addTasks",
        tag="tasks",
        summary="Add a list to an open job",
        does=Writes(jobs.add_tasks, requests.AddTasksRequest),
        answers={200: shapes.AddTasksResponse},
        problems=(400, 404, 409, 413, 415, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/close",
        name="closeJob",
        tag="jobs",
        summary="Close an open job: no more tasks will come",
        does=Writes(jobs.close),
        answers={200: shapes.JobResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/stop",
        name="stopJob",
        tag="jobs",
        summary="Stop the latest run, with a receipt for what was let go",
        does=Writes(runs.stop),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/cancel",
        name="cancelJob",
        tag="jobs",
        summary="Another name for stop",
        does=Writes(runs.stop),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/pause",
        name="pauseJob",
        tag="jobs",
        summary="Pause the latest run",
        does=Writes(runs.pause),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/resume",
        name="resumeJob",
        tag="jobs",
        summary="Resume a paused run",
        does=Writes(runs.resume),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/rerun",
        name="rerunJob",
        tag="jobs",
        summary="Run a job again, all of it or part of it",
        does=Writes(jobs.rerun),
        answers={
            200: shapes.RerunDryRunResponse,
            201: shapes.RerunJobResponse,
            202: shapes.RerunJobResponse,
        },
        problems=(400, 404, 409, 503),
        query=(RETRY, REASON, HOST, DRY_RUN),
        gives={"run_id": "/latest_run/run_id"},
    ),
    Route(
        method="GET",
        path=_JOB + "/runs",
        name="listJobRuns",
        tag="runs",
        summary="List the runs of a job, newest first",
        does=Reads(runs.list_runs),
        answers={200: shapes.ListJobRunsResponse},
        problems=(400, 404),
        query=(LIMIT, CURSOR),
    ),
    Route(
        method="GET",
        path=_RUN,
        name="getJobRun",
        tag="runs",
        summary="Show a run",
        does=Reads(runs.get_run),
        answers={200: shapes.RunResponse},
        problems=(404,),
    ),
    Route(
        method="DELETE",
        path=_RUN,
        name="deleteJobRun",
        tag="runs",
        summary="Delete a run and its results",
        does=Writes(runs.delete_run),
        answers={202: None},
        problems=(404, 409, 503),
    ),
    Route(
        method="GET",
        path=_RUN + "/audit",
        name="auditJobRun",
        tag="runs",
        summary="Recount a run from its rows, and read some of its bodies again",
        does=Reads(audits.get_audit),
        answers={200: shapes.AuditResponse},
        problems=(404, 503),
    ),
    Route(
        method="GET",
        path=_JOB + "/results",
        name="listLatestRunResults",
        tag="tasks",
        summary="Page through the tasks of the latest run",
        does=Reads(results.list_results),
        answers={200: shapes.ListResultsResponse},
        problems=(400, 404),
        query=(RESULT_STATUS, ROWS, CURSOR),
        gives={"task_id": "/results/0/task_id"},
    ),
    Route(
        method="GET",
        path=_RUN + "/results",
        name="listRunResults",
        tag="tasks",
        summary="Page through the tasks of a run",
        does=Reads(results.list_results),
        answers={200: shapes.ListResultsResponse},
        problems=(400, 404),
        query=(RESULT_STATUS, ROWS, CURSOR),
        gives={"task_id": "/results/0/task_id"},
    ),
    Route(
        method="GET",
        path=_JOB + "/tasks/{task_id}/content",
        name="getLatestRunTaskContent",
        tag="tasks",
        summary="Fetch the body of a task of the latest run",
        does=Reads(results.get_content),
        answers={200: "*/*"},
        problems=(404, 409, 422),
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}/content",
        name="getRunTaskContent",
        tag="tasks",
        summary="Fetch the body of a task",
        does=Reads(results.get_content),
        answers={200: "*/*"},
        problems=(404, 409, 422),
        query=(TOKEN,),
        access=Access.LINK,
    ),
    Route(
        method="GET",
        path=_JOB + "/tasks/{task_id}/history",
        name="getLatestRunTaskHistory",
        tag="tasks",
        summary="Show every try at a task of the latest run",
        does=Reads(results.get_history),
        answers={200: shapes.TaskHistoryResponse},
        problems=(404,),
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}/history",
        name="getRunTaskHistory",
        tag="tasks",
        summary="Show every try at a task",
        does=Reads(results.get_history),
        answers={200: shapes.TaskHistoryResponse},
        problems=(404,),
    ),
    Route(
        method="GET",
        path="/v1/events",
        name="listEvents",
        tag="events",
        summary="What happened to your jobs, in order; a stream with `Accept: text/event-stream`",
        does=Reads(events.list_events),
        answers={200: shapes.ListEventsResponse},
        problems=(400,),
        query=(AFTER, EVENTS),
    ),
    Route(
        method="GET",
        path="/healthz",
        name="getHealth",
        tag="operations",
        summary="Whether the process is alive",
        does=Reads(ops.healthz),
        answers={200: shapes.HealthResponse},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/readyz",
        name="getReadiness",
        tag="operations",
        summary="Whether the process wants traffic",
        does=Reads(ops.readyz),
        answers={200: shapes.HealthResponse},
        problems=(503,),
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/metrics",
        name="getMetrics",
        tag="operations",
        summary="Metrics in the Prometheus text format",
        does=Reads(ops.metrics),
        answers={200: "text/plain"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        name="getOpenApi",
        tag="operations",
        summary="This document",
        does=Reads(ops.openapi),
        answers={200: "application/json"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/docs",
        name="getDocs",
        tag="operations",
        summary="This document, as a page",
        does=Reads(ops.docs),
        answers={200: "text/html"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/debug/actors",
        name="getActors",
        tag="operations",
        summary="The live supervision tree, where the operator shows it",
        does=Reads(ops.actors),
        answers={200: "application/json"},
        problems=(404,),
        access=Access.PUBLIC,
    ),
)
