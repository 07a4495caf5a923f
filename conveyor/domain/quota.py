"""Quotas: limits on the data and the requests of one caller or client address (SPEC.md 4.21)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from conveyor.domain.errors import Refused


class Quota(StrEnum):
    """The quotas. Each applies to one caller; those of an address to all callers at it together."""

    LIVE_RUNS = "live_runs"  #: Live runs of a caller.
    OPEN_JOBS = "open_jobs"  #: Open jobs of a caller; only submits of open jobs are refused.
    STORED_TASKS = "stored_tasks"  #: Tasks in all runs of a caller that are not deleted.
    #: Bytes of a caller's bodies that have not expired, from the run counters.
    STORED_BYTES = "stored_bytes"
    EXPORTS_PER_RUN = "exports_per_run"  #: Exports of one run that exist at the same time.
    UPLOAD_SLOTS = "upload_slots"  #: File inputs of a caller that have not been removed.
    #: Requests of a caller per second on average; five seconds' worth at once.
    REQUESTS_PER_S = "requests_per_s"
    STREAMS = "streams"  #: Event streams of a caller at the same time, per process.
    AUDITS = "audits"  #: Audits of a caller at the same time, per process; two over all callers.
    WEBHOOK_TESTS_PER_MIN = "webhook_tests_per_min"  #: Webhook tests of a caller per minute.
    ADDRESS_CALLERS = "address_callers"  #: Callers that one client address may use within an hour.
    ADDRESS_REQUESTS_PER_S = "address_requests_per_s"  #: Requests of one client address per second.
    ADDRESS_STREAMS = "address_streams"  #: Event streams of one client address at the same time.


# The limits of a server. None means no limit, and so does a quota that is missing.
Quotas = Mapping[Quota, int | None]

# The defaults allow a list of a million lines with several reruns. They bound the disk space and
# the CPU time that one caller can take from the others.
DEFAULTS: Mapping[Quota, int] = {
    Quota.LIVE_RUNS: 1_000,
    Quota.OPEN_JOBS: 500,
    Quota.STORED_TASKS: 20_000_000,
    Quota.STORED_BYTES: 500 * 1024**3,
    Quota.EXPORTS_PER_RUN: 10,
    Quota.UPLOAD_SLOTS: 50,
    Quota.REQUESTS_PER_S: 200,
    Quota.STREAMS: 50,
    Quota.AUDITS: 1,
    Quota.WEBHOOK_TESTS_PER_MIN: 10,
    Quota.ADDRESS_CALLERS: 100,
    Quota.ADDRESS_REQUESTS_PER_S: 500,
    Quota.ADDRESS_STREAMS: 200,
}


class QuotaExceeded(Refused):
    """The caller or its address has reached a quota."""

    status = 429
    code = "quota_exceeded"
    title = "Quota exceeded"

    def __init__(self, quota: Quota, limit: int, *, retry_after_s: float) -> None:
        super().__init__(
            f"The quota {quota} is used up: its limit is {limit:,}.", retry_after_s=retry_after_s
        )
        self.quota = quota
