"""What can go wrong between Conveyor and the world, whatever the engine (SPEC 5.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from conveyor.domain.changes import Verdict
from conveyor.domain.errors import ConveyorError


class Unavailable(ConveyorError):
    """The engine did not answer in time, or said no for now. The outcome of a write is unknown."""


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


class StorageFull(Unavailable):
    """The disk is full. Nothing was written."""
