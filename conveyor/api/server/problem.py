"""Problems: the one place that turns errors into responses, all as application/problem+json
(docs/api.md, Errors).

A Refused error has its own status, code and title. The tables below cover all other errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from conveyor.domain.errors import InvalidArgument, InvalidTasks, Refused, problem_type
from conveyor.domain.quota import QuotaExceeded
from conveyor.ports.errors import StorageDamaged, StorageFull, Unavailable
from conveyor.schemas.responses import FieldError, ProblemResponse

MEDIA_TYPE = "application/problem+json"


class LengthRequired(Refused):
    status = 411
    code = "length_required"
    title = "Length required"


class TooLarge(Refused):
    status = 413
    code = "request_too_large"
    title = "Request too large"


class UnsupportedMedia(Refused):
    status = 415
    code = "unsupported_media_type"
    title = "Unsupported media type"


class BadRange(Refused):
    """The requested range begins after the end of the file."""

    status = 416
    code = "range_not_satisfiable"
    title = "Range not satisfiable"


class TooSlow(Refused):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"
    title = "Request timeout"


class OutOfTime(Refused):
    """The server did not finish in time. A retry is safe: the work is either durable or undone."""

    status = 503
    code = "unavailable"
    title = "Temporarily unavailable"


class NotReady(OutOfTime):
    """The process is not ready to serve."""

    code = "not_ready"
    title = "Not ready"


@dataclass(frozen=True, slots=True)
class Kind:
    """The response for an error without a status, code and title of its own."""

    status: int
    code: str
    title: str
    detail: str
    retry_after_s: float | None = None


INTERNAL = Kind(
    500,
    "internal",
    "Internal error",
    "The server failed. The operator finds the cause in its log, under the request id.",
)

# The first matching row applies. Unavailable is last, because the other two are subclasses of it. A
# retry does not help with a damaged storage, so that row has no Retry-After.
WORLD: tuple[tuple[type[Exception], Kind], ...] = (
    (
        StorageFull,
        Kind(
            507,
            "storage_full",
            "Storage is full",
            "The storage of this server is full. Nothing was created. Try again later.",
        ),
    ),
    (
        StorageDamaged,
        Kind(
            503,
            "storage_damaged",
            "Storage is damaged",
            "Stored data cannot be read. The operator of this server must repair it.",
        ),
    ),
    (
        Unavailable,
        Kind(
            503,
            "unavailable",
            "Temporarily unavailable",
            "The storage did not answer. Send the request again.",
            2,
        ),
    ),
)

HTTP: dict[int, Kind] = {
    400: Kind(400, "invalid_argument", "Invalid request", "The request is malformed."),
    404: Kind(404, "not_found", "Not found", "This path does not exist. See /docs."),
    405: Kind(
        405,
        "method_not_allowed",
        "Method not allowed",
        "The path does not support this method. See the Allow header.",
    ),
    408: Kind(408, TooSlow.code, TooSlow.title, "The body did not arrive in time."),
    413: Kind(413, TooLarge.code, TooLarge.title, "The body is larger than the limit."),
}


@dataclass(frozen=True, slots=True)
class Answered:
    """An encoded problem response."""

    status: int
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)


def answer_for(error: Exception, *, request_id: str) -> Answered:
    """Returns the response to any error. An unexpected error reveals no detail."""
    if isinstance(error, Refused):
        return _refusal(error, request_id)
    if isinstance(error, HTTPException):
        return _http(error, request_id)
    kind = next((kind for family, kind in WORLD if isinstance(error, family)), INTERNAL)
    return _encode(_problem_from(kind, request_id), kind.retry_after_s)


def is_expected(error: Exception) -> bool:
    return isinstance(error, (Refused, HTTPException, *(family for family, _ in WORLD)))


def refusal_body(refusal: Refused, *, request_id: str) -> str:
    """The body of a refusal, for a response that is stored and replayed."""
    return _refusal(refusal, request_id).content.decode()


def _refusal(refusal: Refused, request_id: str) -> Answered:
    errors = []
    if isinstance(refusal, InvalidArgument) and refusal.pointer is not None:
        errors = [FieldError(refusal.pointer, refusal.detail)]
    invalid = list(refusal.invalid_tasks) if isinstance(refusal, InvalidTasks) else []
    problem = ProblemResponse(
        type=problem_type(refusal.code),
        title=refusal.title,
        status=refusal.status,
        code=refusal.code,
        detail=refusal.detail,
        instance=request_id,
        errors=errors,
        invalid_tasks=invalid,
        quota=refusal.quota if isinstance(refusal, QuotaExceeded) else None,
    )
    return _encode(problem, refusal.retry_after_s)


def _http(error: HTTPException, request_id: str) -> Answered:
    status = error.code or 500
    known = HTTP.get(status)
    if known is None and status >= 500:
        known = INTERNAL
    if known is None:
        phrase = HTTPStatus(status).phrase
        known = Kind(status, phrase.lower().replace(" ", "_"), phrase, phrase + ".")
    answered = _encode(_problem_from(known, request_id), known.retry_after_s)
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        answered.headers["Allow"] = ", ".join(sorted(error.valid_methods))
    return answered


def _problem_from(kind: Kind, request_id: str) -> ProblemResponse:
    return ProblemResponse(
        type=problem_type(kind.code),
        title=kind.title,
        status=kind.status,
        code=kind.code,
        detail=kind.detail,
        instance=request_id,
    )


def _encode(problem: ProblemResponse, retry_after_s: float | None) -> Answered:
    headers = {}
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return Answered(problem.status, msgspec.json.encode(problem), headers)
