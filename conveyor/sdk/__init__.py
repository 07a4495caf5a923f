"""The SDK: a typed client for the HTTP API (docs/api.md).

from conveyor.sdk import Client

with Client("http://127.0.0.1:8080", "my-key") as client:
    job = client.submit(["https://example.com/"])
    client.wait(job.job_id)
    for result in client.results(job.job_id):
        print(result.url, result.status)

AsyncioClient and TrioClient have the same methods as coroutines and asynchronous generators.
"""

from __future__ import annotations

from conveyor.schemas.crawl import (
    CrawlPageResponse,
    CrawlResponse,
    CrawlResultResponse,
    CreateCrawlRequest,
    StopCrawlResponse,
)
from conveyor.schemas.requests import (
    BucketInput,
    BudgetInput,
    CreateJobInputRequest,
    CsvFields,
    CsvInput,
    DestinationInput,
    HostLimitInput,
    HostLimitsInput,
    SubmitJobRequest,
    TaskInput,
    WebhookInput,
)
from conveyor.schemas.responses import (
    AddTasksResponse,
    AuditResponse,
    DeliveryResponse,
    DeliveryTry,
    EventResponse,
    ExportResponse,
    HmacKeyCreated,
    HmacKeyFinalized,
    HmacKeyList,
    HmacKeyMeta,
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
from conveyor.schemas.schedule import (
    Cadence,
    CalendarInput,
    Daily,
    JobSchedule,
    Monthly,
    RateInput,
    Weekly,
)
from conveyor.sdk.asyncio_client import AsyncioClient
from conveyor.sdk.client import Client
from conveyor.sdk.downloads import Downloaded
from conveyor.sdk.errors import ApiError, BadId, InvalidTask, RetryPolicy, SdkError, Unreachable
from conveyor.sdk.notebook import ProgressBar
from conveyor.sdk.trio_client import TrioClient

__all__ = [
    "AddTasksResponse",
    "ApiError",
    "AsyncioClient",
    "AuditResponse",
    "BadId",
    "BucketInput",
    "BudgetInput",
    "Cadence",
    "CalendarInput",
    "Client",
    "CrawlPageResponse",
    "CrawlResponse",
    "CrawlResultResponse",
    "CreateCrawlRequest",
    "CreateJobInputRequest",
    "CsvFields",
    "CsvInput",
    "Daily",
    "DeliveryResponse",
    "DeliveryTry",
    "DestinationInput",
    "Downloaded",
    "EventResponse",
    "ExportResponse",
    "HmacKeyCreated",
    "HmacKeyFinalized",
    "HmacKeyList",
    "HmacKeyMeta",
    "HostLimitInput",
    "HostLimitsInput",
    "InvalidTask",
    "JobResponse",
    "JobSchedule",
    "ListResultsResponse",
    "Monthly",
    "ProgressBar",
    "RateInput",
    "RerunDryRunResponse",
    "RerunJobResponse",
    "ResultStatus",
    "RetryPolicy",
    "RunResponse",
    "SdkError",
    "StartExportResponse",
    "StopCrawlResponse",
    "SubmitDryRunResponse",
    "SubmitJobRequest",
    "SubmitJobResponse",
    "TaskHistoryEvent",
    "TaskInput",
    "TaskResult",
    "TrioClient",
    "Unreachable",
    "WebhookInput",
    "WebhookResponse",
    "WebhookTestResponse",
    "Weekly",
]
