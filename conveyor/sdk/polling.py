"""How often to look at a run, and how long an outage is sat out: pure, for any client."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.sdk.errors import ApiError, SdkError
from conveyor.sdk.retrying import is_passing
from conveyor.wire.responses import JobResponse, RunResponse

INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 2.0
SHARE = 0.1
OUTAGE_S_MAX = 30.0


@dataclass(slots=True)
class Pace:
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
