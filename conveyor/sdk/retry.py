"""When a call that failed is made again: a pure decision, for any client to act on.

A repeated POST carries the Idempotency-Key of its first try, so repeating is always safe: what
was done is answered from memory, what was begun is finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.domain.run.settlement import backoff_s
from conveyor.schemas.responses import JobResponse, RunResponse
from conveyor.sdk.errors import ApiError, SdkError, Unreachable

IN_PROGRESS = "idempotency_in_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`attempts_max` tries in all, further and further apart, or as the server asks."""

    attempts_max: int = 5
    backoff_s: float = 0.1
    backoff_s_max: float = 5.0
    retry_after_s_max: float = 100.0

    def pause_s(self, error: SdkError, *, attempt: int, luck: float) -> float | None:
        """How long to wait before another try after `attempt` failed; None to let it be.

        `luck`, from 0 to 1, spreads out clients that failed together.
        """
        if attempt >= self.attempts_max or not is_passing(error):
            return None
        asked = error.retry_after_s if isinstance(error, ApiError) else None
        if asked is not None:
            return asked if asked <= self.retry_after_s_max else None
        longest = backoff_s(attempt - 1, first_s=self.backoff_s, delay_s_max=self.backoff_s_max)
        return longest * (0.5 + luck / 2)


def is_passing(error: SdkError) -> bool:
    """Whether the same call may well succeed a little later."""
    if isinstance(error, ApiError):
        return error.status == 503 or (error.status == 409 and error.code == IN_PROGRESS)
    return isinstance(error, Unreachable)


# How often to look at a run, and how long an outage is sat out: pure, for any client.


INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 2.0
SHARE = 0.1
OUTAGE_S_MAX = 30.0


@dataclass(slots=True)
class PollBackoff:
    """Looks often at first and less often later: the end is heard of within a tenth of the time
    that the run took, and within two seconds at most."""

    begun_at: float
    timeout_s: float | None = None
    seen_at: float | None = None

    def interval_s(self, now: float) -> float:
        """How long to wait before the next look; TimeoutError when there is no time for one."""
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
        """Whether to look again although the last look failed."""
        seen_at = self.begun_at if self.seen_at is None else self.seen_at
        return is_passing(error) and now - seen_at < OUTAGE_S_MAX


def run_of(job: JobResponse) -> RunResponse:
    """The latest run of a job; ApiError, as the server would put it, if all are deleted."""
    if job.latest_run is None:
        raise ApiError(404, "not_found", "Not found", "The job has no run.")
    return job.latest_run
