"""The errors of the SDK: the server refused a request, or no server answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from conveyor.schemas.responses import FieldError, ProblemResponse

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
