"""Decides when a failed call is repeated. The decision is pure, and every client uses it.

A repeated POST has the Idempotency-Key of its first attempt, so a repetition is always safe: the
server returns the stored response, or finishes the work that has begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.domain.run.settlement import backoff_s
from conveyor.schemas.responses import JobResponse, RunResponse
from conveyor.sdk.errors import ApiError, SdkError, Unreachable

IN_PROGRESS = "idempotency_in_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """At most `attempts_max` attempts, with growing pauses or the server's Retry-After."""

    attempts_max: int = 5
    backoff_s: float = 0.1
    backoff_s_max: float = 5.0
    retry_after_s_max: float = 100.0

    def pause_s(self, error: SdkError, *, attempt: int, luck: float) -> float | None:
        """Returns the pause after the failed attempt number `attempt`, or None for no retry.

        `luck`, from 0 to 1, makes clients that failed together return at different times.
        """
        if attempt >= self.attempts_max or not is_passing(error):
            return None
        asked = error.retry_after_s if isinstance(error, ApiError) else None
        if asked is not None:
            return asked if asked <= self.retry_after_s_max else None
        longest = backoff_s(attempt - 1, first_s=self.backoff_s, delay_s_max=self.backoff_s_max)
        return longest * (0.5 + luck / 2)


def is_passing(error: SdkError) -> bool:
    """Whether the same call may succeed soon."""
    if isinstance(error, ApiError):
        return error.status == 503 or (error.status == 409 and error.code == IN_PROGRESS)
    return isinstance(error, Unreachable)


# How often a client polls a run, and how long an outage it tolerates. It is pure too.


# The interval is a tenth of the elapsed time, within these bounds: a short run is noticed quickly,
# and a long run costs the server few requests.
INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 2.0
SHARE = 0.1
OUTAGE_S_MAX = 30.0


@dataclass(slots=True)
class PollBackoff:
    """Polls often at first and less often later. The client notices the end of a run within a tenth
    of its duration, and within two seconds at most."""

    begun_at: float
    timeout_s: float | None = None
    seen_at: float | None = None

    def interval_s(self, now: float) -> float:
        """Returns the time until the next poll. Raises TimeoutError if no time is left."""
        elapsed_s = now - self.begun_at
        interval_s = min(max(INTERVAL_S_MIN, elapsed_s * SHARE), INTERVAL_S_MAX)
        if self.timeout_s is None:
            return interval_s
        if elapsed_s >= self.timeout_s:
            raise TimeoutError(f"It has not ended within {self.timeout_s:g} s.")
        return min(interval_s, self.timeout_s - elapsed_s)

    def seen(self, now: float) -> None:
        self.seen_at = now

    def sits_out(self, error: SdkError, now: float) -> bool:
        """Whether to poll again although the last poll failed."""
        seen_at = self.begun_at if self.seen_at is None else self.seen_at
        return is_passing(error) and now - seen_at < OUTAGE_S_MAX


def run_of(job: JobResponse) -> RunResponse:
    """Returns the latest run of a job. Raises ApiError 404 if all runs are deleted."""
    if job.latest_run is None:
        raise ApiError(404, "not_found", "Not found", "The job has no run.")
    return job.latest_run
