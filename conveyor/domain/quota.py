"""Quotas: limits on the data and the requests of one caller or client address (SPEC.md 4.21)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quotas of a server. None means no limit."""

    limits: Mapping[Quota, int | None] = field(default_factory=lambda: DEFAULTS)

    def limit(self, quota: Quota) -> int | None:
        return self.limits.get(quota)


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


class GrowsTooMuch(Refused):
    """The request would need far more storage than its own size."""

    status = 413
    code = "request_too_large"
    title = "Request too large"


# The disk space of one short admitted line with its message, and of one invalid line with its
# problem (embedded engine: 333 and 640 bytes).
TASK_BYTES = 340
BAD_TASK_BYTES = 650
GROWTH_MAX = 100
# A list of one or two hundred lines is never refused: its job and run alone need some kilobytes.
GROWTH_FREE_BYTES = 100_000


def check_growth(sent_bytes: int, *, tasks_count: int, bad_count: int) -> None:
    """Raises GrowsTooMuch for a list that needs more than 100 times the bytes that were sent."""
    stored_bytes = (tasks_count - bad_count) * TASK_BYTES + bad_count * BAD_TASK_BYTES
    if stored_bytes > max(GROWTH_MAX * sent_bytes, GROWTH_FREE_BYTES):
        raise GrowsTooMuch(
            f"{tasks_count:,} lines in {sent_bytes:,} bytes would take up more than {GROWTH_MAX} "
            "times as much on disk; leave out lines that are not valid, and send a list that long "
            "without compression."
        )


@dataclass(slots=True)
class TokenBucket:
    """Allows `rate_per_s` on average and bursts of up to `burst`."""

    rate_per_s: float
    burst: float
    tokens: float
    at: float

    @classmethod
    def full(cls, rate_per_s: float, burst: float, *, now: float) -> TokenBucket:
        return cls(rate_per_s, burst, burst, now)

    def take(self, now: float) -> float:
        """Takes a token; answers how many seconds to wait where there is none, else 0."""
        elapsed_s = max(0.0, now - self.at)
        self.tokens = min(self.burst, self.tokens + elapsed_s * self.rate_per_s)
        self.at = now
        if self.tokens < 1.0:
            return (1.0 - self.tokens) / self.rate_per_s
        self.tokens -= 1.0
        return 0.0

    def is_full(self, now: float) -> bool:
        return self.tokens + (now - self.at) * self.rate_per_s >= self.burst
