"""The routes of jobs, their lists, schedules and events
(docs/api.md, Conventions)."""

from __future__ import annotations

from conveyor.api import events, jobs, runs, schedule, streaming_submit, upload
from conveyor.api.routes.route import (
    CURSOR,
    DRY_RUN,
    LIMIT,
    Access,
    Command,
    Parameter,
    Query,
    Route,
    Upload,
)
from conveyor.domain import limits
from conveyor.domain.model import FailureReason, JobStatus, JobType, TaskStatus
from conveyor.schemas import requests
from conveyor.schemas import responses as shapes
from conveyor.schemas import schedules as schedule_shapes
from conveyor.schemas.budget import BudgetInput

_STATUSES = "|".join(TaskStatus)
JOB_STATUS = Parameter("status", {"type": "string", "enum": list(JobStatus)}, "Only such jobs.")
JOB_TYPE = Parameter("type", {"type": "string", "enum": list(JobType)}, "Only such jobs.")
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
JOB_EXTERNAL_ID = Parameter(
    "external_id", {"type": "string"}, "Only jobs that were submitted with this `external_id`."
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
UPLOAD_TOKEN = Parameter("token", {"type": "string"}, "Stands in for the API key.")

_JOB = "/v1/jobs/{job_id}"
_RUN = _JOB + "/runs/{run_id}"

JOB_ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/jobs",
        name="submitJob",
        tag="jobs",
        summary="Submit a job",
        does=Command(jobs.submit, requests.SubmitJobRequest, long=streaming_submit.SUBMIT),
        answers={
            200: shapes.SubmitDryRunResponse,
            201: shapes.SubmitJobResponse,
            202: shapes.SubmitJobResponse,
        },
        problems=(400, 404, 409, 413, 415, 503),
        query=(DRY_RUN,),
        gives={"job_id": "/job_id", "run_id": "/latest_run/run_id"},
    ),
    Route(
        method="GET",
        path="/v1/jobs",
        name="listJobs",
        tag="jobs",
        summary="List your jobs, newest first",
        does=Query(jobs.list_jobs),
        answers={200: shapes.ListJobsResponse},
        problems=(400,),
        query=(JOB_STATUS, JOB_TYPE, JOB_EXTERNAL_ID, LIMIT, CURSOR),
    ),
    Route(
        method="GET",
        path=_JOB,
        name="getJob",
        tag="jobs",
        summary="Show a job and its latest run",
        does=Query(jobs.get_job),
        answers={200: shapes.JobResponse},
        problems=(404,),
    ),
    Route(
        method="DELETE",
        path=_JOB,
        name="deleteJob",
        tag="jobs",
        summary="Delete a job with everything it made",
        does=Command(jobs.delete_job),
        answers={202: None},
        problems=(404, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/tasks",
        name="addTasks",
        tag="tasks",
        summary="Add a list to an open job",
        does=Command(jobs.add_tasks, requests.AddTasksRequest, long=streaming_submit.ADD_TASKS),
        answers={200: shapes.AddTasksResponse},
        problems=(400, 404, 409, 413, 415, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/close",
        name="closeJob",
        tag="jobs",
        summary="Close an open job: no more tasks will come",
        does=Command(jobs.close),
        answers={200: shapes.JobResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/stop",
        name="stopJob",
        tag="jobs",
        summary="Stop the latest run, with a receipt for what was let go",
        does=Command(runs.stop),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/cancel",
        name="cancelJob",
        tag="jobs",
        summary="Another name for stop",
        does=Command(runs.stop),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/pause",
        name="pauseJob",
        tag="jobs",
        summary="Pause the latest run",
        does=Command(runs.pause),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/resume",
        name="resumeJob",
        tag="jobs",
        summary="Resume a paused run",
        does=Command(runs.resume),
        answers={200: shapes.RunResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/rerun",
        name="rerunJob",
        tag="jobs",
        summary="Run a job again, all of it or part of it",
        does=Command(jobs.rerun),
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
        method="PUT",
        path=_JOB + "/schedule",
        name="updateJobSchedule",
        tag="jobs",
        summary="Replace the schedule of a scheduled job",
        does=Command(schedule.replace, schedule_shapes.JobSchedule),
        answers={200: shapes.JobResponse},
        problems=(400, 404, 409, 413, 415, 503),
    ),
    Route(
        method="POST",
        path=_JOB + "/schedule/state",
        name="updateScheduleState",
        tag="jobs",
        summary="Pause or resume the schedule of a job",
        does=Command(schedule.set_state, schedule_shapes.UpdateScheduleStateRequest),
        answers={200: shapes.JobResponse},
        problems=(400, 404, 409, 413, 415, 503),
    ),
    Route(
        method="PUT",
        path=_JOB + "/budget",
        name="setJobBudget",
        tag="jobs",
        summary="Change the budget; a run that waits for it goes on",
        does=Command(jobs.set_budget, BudgetInput),
        answers={200: shapes.JobResponse},
        problems=(400, 404, 409, 413, 415, 503),
    ),
    Route(
        method="GET",
        path="/v1/events",
        name="listEvents",
        tag="events",
        summary="What happened to your jobs, in order; a stream with `Accept: text/event-stream`",
        does=Query(events.list_events),
        answers={200: shapes.ListEventsResponse},
        problems=(400,),
        query=(AFTER, EVENTS),
    ),
    Route(
        method="POST",
        path="/v1/job_inputs",
        name="createJobInput",
        tag="job_inputs",
        summary="Make a slot to upload a list to",
        does=Command(upload.create_input, requests.CreateJobInputRequest),
        answers={201: shapes.CreateJobInputResponse},
        problems=(400, 409, 413, 415, 503),
    ),
    Route(
        method="PUT",
        path="/v1/job_inputs/{input_id}/upload",
        name="uploadJobInput",
        tag="job_inputs",
        summary="Upload a list, plain or as gzip, in the place of any that was there",
        does=Upload(upload.upload, limits.UPLOAD_BYTES_MAX),
        answers={200: shapes.UploadResponse},
        problems=(404, 411, 413, 415, 503, 507),
        query=(UPLOAD_TOKEN,),
        access=Access.LINK,
    ),
)
