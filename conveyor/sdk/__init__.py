"""The SDK: a typed client for the HTTP API (SPEC 4).

from conveyor.sdk import Client

with Client("http://127.0.0.1:8080", "my-key") as client:
    job = client.submit(["https://example.com/"])
    client.wait(job.job_id)
    for result in client.results(job.job_id):
        print(result.url, result.status)
"""

from __future__ import annotations

from conveyor.sdk.client import Client
from conveyor.sdk.downloads import Downloaded
from conveyor.sdk.errors import ApiError, BadId, InvalidTask, SdkError, Unreachable
from conveyor.sdk.retrying import RetryPolicy
from conveyor.wire.limits import BudgetInput, HostLimitInput, HostLimitsInput
from conveyor.wire.requests import SubmitJobRequest, TaskInput, WebhookInput
from conveyor.wire.responses import (
    AddTasksResponse,
    JobResponse,
    RerunJobResponse,
    RunResponse,
    SubmitJobResponse,
    TaskHistoryEvent,
    TaskResult,
)

__all__ = [
    "AddTasksResponse",
    "ApiError",
    "BadId",
    "BudgetInput",
    "Client",
    "Downloaded",
    "HostLimitInput",
    "HostLimitsInput",
    "InvalidTask",
    "JobResponse",
    "RerunJobResponse",
    "RetryPolicy",
    "RunResponse",
    "SdkError",
    "SubmitJobRequest",
    "SubmitJobResponse",
    "TaskHistoryEvent",
    "TaskInput",
    "TaskResult",
    "Unreachable",
    "WebhookInput",
]
