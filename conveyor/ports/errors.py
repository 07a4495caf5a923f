"""The errors that ports raise, whatever the engine (docs/engines.md, Changes and guards)."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from conveyor.domain.changes import Verdict
from conveyor.domain.errors import ConveyorError


class Unavailable(ConveyorError):
    """The engine did not respond in time, or refused for now. The outcome of a write is unknown.

    With `needs_operator` waiting does not help. `code` is the service's own code of the cause, if
    any.
    """

    needs_operator: bool = False
    code: str | None = None


class PartlyUnavailable(Unavailable):
    """Some changes of a commit have no verdict; `verdicts` has None in their places. Those in
    `turned_away` certainly wrote nothing; the outcome of the others is unknown."""

    def __init__(
        self,
        cause: str,
        verdicts: Sequence[Verdict | None],
        turned_away: Collection[int] = frozenset(),
    ) -> None:
        super().__init__(cause)
        self.verdicts = verdicts
        self.turned_away = turned_away


class QueueGone(ConveyorError):
    """The queue of a run does not exist: the run has ended, or the queue is not created yet. The
    run's row shows which."""


class BlobMissing(ConveyorError):
    """There is no body under this key."""


class BlobTooLarge(ConveyorError):
    """The body under this key is larger than allowed."""


class RowDamaged(ConveyorError):
    """A stored row cannot be decoded. A retry does not help; other rows are not affected."""

    def __init__(self, kind: str, address: str, cause: str) -> None:
        super().__init__(f"the row {address} of {kind} cannot be decoded: {cause}")
        self.kind = kind
        self.address = address


class StorageDamaged(Unavailable):
    """Stored data cannot be read until an operator repairs it. A retry does not help."""

    needs_operator = True


class StorageFull(Unavailable):
    """The disk is full. Nothing was written."""


# Shortages of file descriptors (process and machine), memory, buffers and local ports.
_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)
# CPython raises a plain RuntimeError if the system refuses a thread. Only the text identifies it.
_NO_THREAD = "can't start new thread"


def is_resource_shortage(error: BaseException) -> bool:
    """Returns whether this process has run out of descriptors, memory, threads or ports. That is an
    outage of the process and proves nothing about the peer or the task."""
    match error:
        case BaseExceptionGroup():
            return any(map(is_resource_shortage, error.exceptions))
        case MemoryError():
            return True
        case OSError():
            return error.errno in _SHORTAGES
        case RuntimeError():
            return _NO_THREAD in str(error)
        case _:
            return False
