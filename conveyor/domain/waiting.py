"""Waiting: the words for why a run is not moving, from the nearest cause outwards (SPEC 4.7)."""

from __future__ import annotations

from enum import StrEnum


class WaitReason(StrEnum):
    """What holds a live run up."""

    PAUSED = "paused"
    INGEST = "ingest"
    BUDGET = "budget"
    JOB_CAP = "job_cap"
    HOST_CAP = "host_cap"
    RATE_LIMITED = "rate_limited"
    RETRY_BACKOFF = "retry_backoff"
    WORKERS_BUSY = "workers_busy"
    NO_WORKERS = "no_workers"
