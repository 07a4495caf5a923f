"""What can go wrong between Conveyor and the world, whatever the engine
(docs/engines.md, Changes and guards)."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from conveyor.domain.changes import Verdict
from conveyor.domain.errors import ConveyorError


class Unavailable(ConveyorError):
    """The engine did not answer in time, or said no for now. The outcome of a write is unknown.

    With `needs_operator` no wait helps; `code` is the service's own word for the cause, if any.
    """

    needs_operator: bool = False
    code: str | None = None


class PartlyUnavailable(Unavailable):
    """Some changes of a commit have no verdict, and None in their places. Of those in `turned_away`
    it is certain that nothing was written; the outcome of the others is unknown."""

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
    """The queue of a run does not exist: ended, or not made yet. The run's row tells which."""


class BlobMissing(ConveyorError):
    """No body lies under this key."""


class BlobTooLarge(ConveyorError):
    """The body under this key is larger than it may be."""


class RowDamaged(ConveyorError):
    """A stored row cannot be decoded. Asking again is of no use; other rows are as good as ever."""

    def __init__(self, kind: str, address: str, cause: str) -> None:
        super().__init__(f"the row {address} of {kind} cannot be decoded: {cause}")
        self.kind = kind
        self.address = address


class StorageDamaged(Unavailable):
    """What is stored cannot be read, and will not be: a person has to mend it. Asking again is of
    no use."""

    needs_operator = True


class StorageFull(Unavailable):
    """The disk is full. Nothing was written."""


# Descriptors of the process and of the machine, memory, buffers and local ports.
_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)
# CPython's only sign that the system refused a thread.
_NO_THREAD = "can't start new thread"


def is_resource_shortage(error: BaseException) -> bool:
    """Whether this process has run out of descriptors, memory, threads or ports: an outage of the
    process, which says nothing about the peer or the task."""
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
