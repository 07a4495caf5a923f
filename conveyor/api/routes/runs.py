"""The routes of runs: their tasks, results and exports (docs/api.md, Conventions)."""

from __future__ import annotations

from conveyor.api import export, results, runs
from conveyor.api.routes.route import CURSOR, LIMIT, Access, Command, Parameter, Query, Route
from conveyor.domain import limits
from conveyor.domain.export.export import ExportFormat
from conveyor.schemas import responses as shapes
from conveyor.usecases.run.results import FILTERS

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
TOKEN = Parameter("token", {"type": "string"}, "From a `result_url`; stands in for the API key.")
REDIRECT = Parameter(
    "redirect",
    {"type": "boolean", "default": False},
    "Where the storage can hand it out itself, answer with a redirect to there.",
)
EXPORT_FORMAT = Parameter(
    "format",
    {"type": "string", "enum": list(ExportFormat), "default": ExportFormat.ZIP},
    "What kind of file to make.",
)
EXPORT_TOKEN = Parameter(
    "token", {"type": "string"}, "From a `download_url`; stands in for the API key."
)

_JOB = "/v1/jobs/{job_id}"
_RUN = _JOB + "/runs/{run_id}"

RUN_ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path=_JOB + "/runs",
        name="listJobRuns",
        tag="runs",
        summary="List the runs of a job, newest first",
        does=Query(runs.list_runs),
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
        does=Query(runs.get_run),
        answers={200: shapes.RunResponse},
        problems=(404,),
    ),
    Route(
        method="DELETE",
        path=_RUN,
        name="deleteJobRun",
        tag="runs",
        summary="Delete a run and its results",
        does=Command(runs.delete_run),
        answers={202: None},
        problems=(404, 409, 503),
    ),
    Route(
        method="GET",
        path=_RUN + "/audit",
        name="auditJobRun",
        tag="runs",
        summary="Recount a run from its rows, and read some of its bodies again",
        does=Query(runs.get_audit),
        answers={200: shapes.AuditResponse},
        problems=(404, 503),
    ),
    Route(
        method="GET",
        path=_JOB + "/results",
        name="listLatestRunResults",
        tag="tasks",
        summary="Page through the tasks of the latest run",
        does=Query(results.list_results),
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
        does=Query(results.list_results),
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
        does=Query(results.get_content),
        answers={200: "*/*", 302: None},
        problems=(400, 404, 409, 410, 422),
        query=(REDIRECT,),
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}/content",
        name="getRunTaskContent",
        tag="tasks",
        summary="Fetch the body of a task",
        does=Query(results.get_content),
        answers={200: "*/*", 302: None},
        problems=(400, 404, 409, 410, 422),
        query=(TOKEN, REDIRECT),
        access=Access.LINK,
    ),
    Route(
        method="GET",
        path=_JOB + "/tasks/{task_id}/history",
        name="getLatestRunTaskHistory",
        tag="tasks",
        summary="Show every try at a task of the latest run",
        does=Query(results.get_history),
        answers={200: shapes.TaskHistoryResponse},
        problems=(404,),
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}/history",
        name="getRunTaskHistory",
        tag="tasks",
        summary="Show every try at a task",
        does=Query(results.get_history),
        answers={200: shapes.TaskHistoryResponse},
        problems=(404,),
    ),
    Route(
        method="POST",
        path=_RUN + "/exports",
        name="startResultsExport",
        tag="runs",
        summary="Ask for the results of an ended run as one file",
        does=Command(export.start),
        answers={202: shapes.StartExportResponse},
        problems=(400, 404, 409, 410, 503),
        query=(EXPORT_FORMAT,),
    ),
    Route(
        method="GET",
        path=_RUN + "/exports/{export_id}",
        name="getResultsExport",
        tag="runs",
        summary="Show how far an export is, with a link to the file once it is made",
        does=Query(export.get),
        answers={200: shapes.ExportResponse},
        problems=(404,),
    ),
    Route(
        method="GET",
        path=_RUN + "/exports/{export_id}/content",
        name="getResultsExportContent",
        tag="runs",
        summary="Fetch the file of an export, all of it or from some byte on",
        does=Query(export.get_content),
        answers={200: "*/*", 206: "*/*", 302: None},
        problems=(400, 404, 409, 416),
        query=(EXPORT_TOKEN, REDIRECT),
        access=Access.LINK,
    ),
)
