"""The errors of the domain, named by whose fault they are (docs/api.md, Errors)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class InvalidTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One refused line of a submitted list: where it stands, why, and a shortened look at it."""

    index: int
    reason: str
    value: str | None = None


class ConveyorError(Exception):
    """Everything that Conveyor raises on purpose."""


class IllegalTransition(ConveyorError):
    """We asked the lifecycle for a step it does not have: a bug, never an answer."""


class Refused(ConveyorError):
    """The caller asked for something that cannot be; `code` is the contract's word for it."""

    status: int = 400
    code: str = "invalid_argument"
    title: str = "Invalid request"

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s


class InvalidArgument(Refused):
    """A field has a value that it may not have; `pointer` is a JSON pointer to it."""

    def __init__(self, detail: str, *, pointer: str | None = None, code: str | None = None) -> None:
        super().__init__(detail)
        self.pointer = pointer
        if code is not None:
            self.code = code


class InvalidTasks(Refused):
    """Some lines of the list are bad; nothing was created."""

    title = "Some tasks are invalid"

    def __init__(self, detail: str, invalid_tasks: Sequence[InvalidTask]) -> None:
        super().__init__(detail)
        self.invalid_tasks = tuple(invalid_tasks)


class Unauthenticated(Refused):
    """No API key, or one that is not let in."""

    status = 401
    code = "unauthenticated"
    title = "Authentication required"


class NotFound(Refused):
    """Unknown, deleted or foreign: the answer is the same, byte for byte."""

    status = 404
    code = "not_found"
    title = "Not found"


class InputNotFound(NotFound):
    """The same, for a file input; one that has expired is gone as well."""

    code = "file_input_not_found"


class Conflict(Refused):
    """The thing is in a state that does not allow this."""

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
    """The content of a task that is still waiting or in flight."""

    code = "task_not_ready"
    title = "Task is not finished"


class ResultExpired(Refused):
    """It was here, and its time is over."""

    status = 410
    code = "result_expired"
    title = "Result expired"


class ResultDamaged(Refused):
    """The stored body differs from the one that was fetched."""

    status = 500
    code = "result_damaged"
    title = "Result is damaged"


class KeyConflict(Conflict):
    """An Idempotency-Key came back with another request."""

    code = "idempotency_key_conflict"
    title = "Idempotency-Key reused"


class KeyInProgress(Conflict):
    """The first request with this Idempotency-Key is still being worked on."""

    code = "idempotency_in_progress"
    title = "Request in progress"
