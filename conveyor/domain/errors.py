"""The errors of the domain, grouped by the party at fault, and the problem details of failed tasks
(docs/api.md, Errors)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from conveyor.domain.model import Problem


class InvalidTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One refused line of a submitted list."""

    index: int  #: The position of the line in the list, from 0.
    reason: str  #: What is wrong with it.
    value: str | None = None  #: A shortened copy of the invalid value, without secrets.


class ConveyorError(Exception):
    """The base of all errors that Conveyor raises deliberately."""


class Refused(ConveyorError):
    """The request cannot be fulfilled. `code` is the error code of the API contract."""

    status: int = 400
    code: str = "invalid_argument"
    title: str = "Invalid request"

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s


class InvalidArgument(Refused):
    """A field has an invalid value. `pointer` is its JSON pointer."""

    def __init__(self, detail: str, *, pointer: str | None = None, code: str | None = None) -> None:
        super().__init__(detail)
        self.pointer = pointer
        if code is not None:
            self.code = code


class InvalidTasks(Refused):
    """Some lines of the list are invalid. Nothing was created."""

    title = "Some tasks are invalid"

    def __init__(self, detail: str, invalid_tasks: Sequence[InvalidTask]) -> None:
        super().__init__(detail)
        self.invalid_tasks = tuple(invalid_tasks)


class Unauthenticated(Refused):
    """The API key is missing or not accepted."""

    status = 401
    code = "unauthenticated"
    title = "Authentication required"


class NotFound(Refused):
    """The object is unknown, deleted, or belongs to another caller. The response is the same for
    all three, so that it reveals nothing.
    """

    status = 404
    code = "not_found"
    title = "Not found"


class InputNotFound(NotFound):
    """The file input is unknown, expired, or belongs to another caller."""

    code = "file_input_not_found"


class Conflict(Refused):
    """The state of the object does not allow the operation."""

    status = 409
    code = "conflict"
    title = "Conflict"

    def __init__(
        self, detail: str, *, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)
        if code is not None:
            self.code = code


class TaskNotReady(Conflict):
    """The task is still waiting or in flight, so it has no content yet."""

    code = "task_not_ready"
    title = "Task is not finished"


class ResultExpired(Refused):
    """The result existed and has expired."""

    status = 410
    code = "result_expired"
    title = "Result expired"


class ResultDamaged(Refused):
    """The stored body differs from the one that was fetched."""

    status = 500
    code = "result_damaged"
    title = "Result is damaged"


class KeyConflict(Conflict):
    """The Idempotency-Key was used with another request before."""

    code = "idempotency_key_conflict"
    title = "Idempotency-Key reused"


class KeyInProgress(Conflict):
    """The first request with this Idempotency-Key is still in progress."""

    code = "idempotency_in_progress"
    title = "Request in progress"


# Problem details: the one place where their types and titles are written (docs/api.md, Errors).


def problem_type(code: str) -> str:
    return f"urn:conveyor:problem:{code}"


def make_problem(code: str, title: str, status: int, detail: str | None = None) -> Problem:
    return Problem(type=problem_type(code), title=title, status=status, code=code, detail=detail)


def worker_lost(times: int) -> Problem:
    return make_problem(
        "worker_crashed",
        "The worker was lost",
        500,
        f"The worker of this task was lost {times} times before it could report.",
    )


def handler_crashed() -> Problem:
    return make_problem(
        "worker_crashed",
        "The worker crashed over this task",
        500,
        "An error in the worker, not in the site, ended this attempt. Its log says more.",
    )


def row_damaged(fields: Collection[str]) -> Problem:
    return make_problem(
        "row_damaged",
        "The stored task cannot be read",
        500,
        f"Fields of its row are damaged: {', '.join(sorted(fields))}. It was not fetched.",
    )


def page_discarded(detail: str) -> Problem:
    return make_problem("page_discarded", "The page was fetched but not stored", 503, detail)


def call_deferred(detail: str) -> Problem:
    return make_problem("call_deferred", "The call was refused for now", 503, detail)
