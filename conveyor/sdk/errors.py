"""The errors of the SDK, and the pure decisions when a failed call or a poll is repeated.

A repeated POST has the Idempotency-Key of its first attempt, so a repetition is always safe: the
server returns the stored response, or finishes the work that has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from conveyor.domain.timing import backoff_s
from conveyor.schemas.responses import FieldError, JobResponse, ProblemResponse, RunResponse

# The code of an ApiError whose response was not from this API.
UNEXPECTED = "unexpected_answer"

_PROBLEM = msgspec.json.Decoder(ProblemResponse)


class InvalidTask(msgspec.Struct, frozen=True):
    """One refused line of a submitted list: its position, the reason, and a shortened copy."""

    index: int
    reason: str
    value: str | None = None


class SdkError(Exception):
    """The base of all errors that the SDK raises deliberately."""


class BadId(SdkError):
    """A text that cannot be an id. No request was sent."""


@dataclass(eq=False)
class Unreachable(SdkError):
    """No server answered at `url`, or the connection broke, after all attempts of the policy."""

    url: str
    why: str

    def __str__(self) -> str:
        return f"No answer from {self.url}: {self.why}"


@dataclass(eq=False)
class ApiError(SdkError):
    """The server refused the request or failed. Programs should branch on `code`."""

    status: int
    code: str
    title: str
    detail: str | None = None
    invalid_tasks: tuple[InvalidTask, ...] = ()
    request_id: str | None = None
    errors: tuple[FieldError, ...] = ()
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return f"{self.detail or self.title} ({self.status} {self.code})"


def error_from(status: int, headers: Mapping[str, str], content: bytes) -> ApiError:
    """Returns the error for a response: its problem details, or only its status."""
    request_id, wait_s = headers.get("x-request-id"), _seconds(headers.get("retry-after", ""))
    try:
        problem = _PROBLEM.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ApiError(
            status, UNEXPECTED, _phrase(status), request_id=request_id, retry_after_s=wait_s
        )
    return ApiError(
        status,
        problem.code,
        problem.title,
        problem.detail,
        tuple(InvalidTask(t.index, t.reason, t.value) for t in problem.invalid_tasks),
        request_id or problem.instance,
        tuple(problem.errors),
        wait_s,
    )


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"Status {status}"


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
        if attempt >= self.attempts_max or not is_temporary(error):
            return None
        after_s = error.retry_after_s if isinstance(error, ApiError) else None
        if after_s is not None:
            return after_s if after_s <= self.retry_after_s_max else None
        longest = backoff_s(attempt - 1, first_s=self.backoff_s, delay_s_max=self.backoff_s_max)
        return longest * (0.5 + luck / 2)


def is_temporary(error: SdkError) -> bool:
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

    def record_success(self, now: float) -> None:
        self.seen_at = now

    def tolerates(self, error: SdkError, now: float) -> bool:
        """Whether to poll again although the last poll failed."""
        seen_at = self.begun_at if self.seen_at is None else self.seen_at
        return is_temporary(error) and now - seen_at < OUTAGE_S_MAX


def run_of(job: JobResponse) -> RunResponse:
    """Returns the latest run of a job. Raises ApiError 404 if all runs are deleted."""
    if job.latest_run is None:
        raise ApiError(404, "not_found", "Not found", "The job has no run.")
    return job.latest_run
