"""What the pages say about failures and waiting, and what helps (docs/dashboard.md, Waiting)."""

from __future__ import annotations

from typing import NamedTuple

from conveyor.domain.crawl_record import CrawlEnd
from conveyor.domain.model import EventType, FailureReason, RunFailure
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.domain.schedule import SkipReason


class Wait(NamedTuple):
    title: str
    remedy: str


WAITS: dict[WaitReason, Wait] = {
    WaitReason.PAUSED: Wait("Paused", "Resume the run to continue."),
    WaitReason.INGEST: Wait(
        "The list is being read", "Nothing to do: tasks start as their lines are read."
    ),
    WaitReason.BUDGET: Wait(
        "The budget is used up", "Raise the budget of the job; the run continues by itself."
    ),
    WaitReason.STORAGE: Wait(
        "Pages cannot be stored",
        "Free disk space, or restore the access to the storage. Fetching continues by itself.",
    ),
    WaitReason.RESOURCES: Wait(
        "A worker has no resources left",
        "Raise the limit of open files, or lower CONVEYOR_CONCURRENCY.",
    ),
    WaitReason.GATEWAY_UNAVAILABLE: Wait(
        "The gateway does not answer",
        "Check the gateway and the network. Single calls test it, and the run continues by itself.",
    ),
    WaitReason.JOB_CAP: Wait(
        "As many pages are in flight as the job allows",
        "This is normal. A larger max_inflight makes the next job faster.",
    ),
    WaitReason.GATEWAY_LIMIT: Wait(
        "The gateway accepts no more calls at the same time",
        "A larger plan at the gateway, or fewer jobs at the same time.",
    ),
    WaitReason.HOST_CAP: Wait(
        "The limits of the hosts are reached",
        "This is what the host limits are for. If the sites can bear more, raise them: that holds "
        "from the next run on.",
    ),
    WaitReason.RATE_LIMITED: Wait(
        "A site asked for fewer requests",
        "The tasks are repeated later. A host limit prevents it next time.",
    ),
    WaitReason.RETRY_BACKOFF: Wait(
        "The remaining tasks wait for their next attempt",
        "Nothing to do: they are repeated by themselves. The failures below show why.",
    ),
    WaitReason.WORKERS_BUSY: Wait(
        "Other runs use every slot", "Add workers, or raise CONVEYOR_CONCURRENCY."
    ),
    WaitReason.NO_WORKERS: Wait(
        "No worker is running", "Start one: conveyor dev, or conveyor worker on a shared engine."
    ),
}

FAILURES: dict[str, str] = {
    FailureReason.AUTH_FAILED: "The credentials were refused",
    FailureReason.BLOCKED: "The site refused the request",
    FailureReason.BAD_TARGET: "The page or the host does not exist",
    FailureReason.RATE_LIMITED: "The site asked for fewer requests",
    FailureReason.TIMEOUT: "No complete answer in time",
    FailureReason.GATEWAY_ERROR: "The gateway or the network failed",
    FailureReason.OTHER: "Another cause",
    RunFailure.INSUFFICIENT_CREDITS: "The account has no credits left",
    RunFailure.SUBSCRIPTION_INACTIVE: "The account has no active plan",
    RunFailure.API_KEY_CAP_REACHED: "The API key has used all that it may use",
}

REMEDIES: dict[str, str] = {
    FailureReason.AUTH_FAILED: "Correct the key or the headers, then rerun.",
    FailureReason.BLOCKED: "Another gateway or other parameters may help.",
    FailureReason.BAD_TARGET: "A rerun rarely helps: correct the URLs.",
    FailureReason.RATE_LIMITED: "Set a host limit, then rerun.",
    FailureReason.TIMEOUT: "A rerun often helps.",
    FailureReason.GATEWAY_ERROR: "A rerun often helps.",
    FailureReason.OTHER: "The problem of each task says more.",
}


CRAWL_ENDS: dict[CrawlEnd, str] = {
    CrawlEnd.MAX_ITEMS: "It ended when it had kept as many pages as it may.",
    CrawlEnd.MAX_PAGES: "It ended when it had fetched as many pages as it may.",
    CrawlEnd.MAX_SECONDS: "It ended when its time was over.",
    CrawlEnd.USER: "It was stopped.",
}

EVENTS: dict[str, str] = {
    EventType.JOB_CREATED: "The job was submitted",
    EventType.JOB_CLOSED: "The job was closed: it takes no more tasks",
    EventType.JOB_DELETED: "The job was deleted",
    EventType.RUN_CREATED: "The run was created",
    EventType.RUN_PAUSED: "The run was paused",
    EventType.RUN_RESUMED: "The run was resumed",
    EventType.RUN_COMPLETED: "The run is complete: every task has ended",
    EventType.RUN_STOPPED: "The run was stopped",
    EventType.RUN_FAILED: "The run failed",
    EventType.RUN_DELETED: "The run was deleted",
    EventType.INGEST_DONE: "The list was read to its end",
}


SKIPS: dict[str, str] = {
    SkipReason.MISSED: "no process was running",
    SkipReason.OVERLAP: "the earlier run was still live",
    SkipReason.PAUSED: "the schedule was paused",
}


def explain_wait(reason: str) -> Wait:
    return WAITS[WaitReason(reason)]
