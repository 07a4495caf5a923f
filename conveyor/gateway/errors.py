"""The failures of a call, with the codes of the ZenRows fetch API (docs/gateway.md, Answers).

Workers read the codes to decide whether a retry may help (engines/http/zenrows.py), so a failure
of the site, of the caller and of the gateway must never share one.
"""

from __future__ import annotations

from enum import Enum

from conveyor.domain.errors import ConveyorError
from conveyor.http_client.errors import (
    BodyTooLarge,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    NoMemoryForBody,
    OutOfResources,
    TimedOut,
)
from conveyor.ports.gateway import NotScraped


class Fault(Enum):
    """A code, its HTTP status and its title."""

    NO_KEY = ("AUTH001", 401, "The API key is missing")
    UNKNOWN_KEY = ("AUTH002", 401, "The API key is not known here")
    TOO_MANY_CALLS = ("AUTH006", 429, "Too many concurrent requests")
    FORBIDDEN_TARGET = ("REQS001", 400, "This URL may not be fetched")
    BAD_PARAMETER = ("REQS004", 400, "A parameter is invalid")
    METHOD_NOT_ALLOWED = ("REQS005", 405, "The method is not allowed")
    NO_CONTENT = ("RESP001", 422, "The page could not be fetched")
    NOT_FOUND = ("RESP002", 404, "The page does not exist")
    NOT_EXTRACTED = ("RESP003", 415, "Nothing can be extracted from the page")
    TOO_LARGE = ("RESP005", 413, "The page is too large")
    NO_SUCH_HOST = ("RESP007", 404, "The site does not exist")
    TOO_SLOW = ("CTX0002", 504, "The page took too long")
    UNAVAILABLE = ("ERR0000", 503, "The gateway has no room for this call")
    INTERNAL = ("ERR0001", 500, "The gateway failed")

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]

    @property
    def title(self) -> str:
        return self.value[2]


class CallFailed(ConveyorError):
    """There is no page. `detail` is shown to the caller; it has no secret and no text of a site."""

    def __init__(self, fault: Fault, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail
        self.retry_after_s = retry_after_s


class CallRefused(Exception):
    """The browser refuses a command, for example because the page navigated away."""

    def __init__(self, method: str, message: str) -> None:
        super().__init__(f"{method}: {message}")
        self.message = message


def failure_from(error: FetchFailed) -> CallFailed:
    """Returns the failure of a fetch without a response."""
    match error:
        case ForbiddenTarget():
            return CallFailed(Fault.FORBIDDEN_TARGET, error.detail)
        case NameNotResolved(is_temporary=False):
            return CallFailed(Fault.NO_SUCH_HOST, error.detail)
        case BodyTooLarge():
            return CallFailed(Fault.TOO_LARGE, error.detail)
        case TimedOut():
            return CallFailed(Fault.TOO_SLOW, error.detail)
        case OutOfResources() | NoMemoryForBody():
            return CallFailed(Fault.UNAVAILABLE, error.detail, retry_after_s=5)
        case _:
            return CallFailed(Fault.NO_CONTENT, error.detail)


_FAULTS = {
    "invalid_param_value": Fault.BAD_PARAMETER,
    "not_extracted": Fault.NOT_EXTRACTED,
    "not_html": Fault.NOT_EXTRACTED,
    "page_soft_404": Fault.NOT_FOUND,
    "timeout": Fault.TOO_SLOW,
    "too_large": Fault.TOO_LARGE,
}


def failure_of_content(failure: NotScraped) -> CallFailed:
    """Returns the failure of an answer that is not the page, or from which nothing is extracted."""
    fault = _FAULTS.get(failure.problem.code, Fault.NO_CONTENT)
    return CallFailed(fault, f"{failure.problem.code}: {failure.problem.detail}")


def failure_of_status(status: int) -> CallFailed:
    """Returns the failure of a page with a status that does not count as a success."""
    detail = f"the site answered with status {status}"
    fault = Fault.NOT_FOUND if status in {404, 410} else Fault.NO_CONTENT
    return CallFailed(fault, detail)
