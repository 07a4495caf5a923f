"""What can go wrong between Conveyor and the world, whatever the engine (SPEC 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.domain.changes import Verdict
from conveyor.domain.errors import ConveyorError


class Unavailable(ConveyorError):
    """The engine did not answer in time, or said no for now. The outcome of a write is unknown."""


class PartlyUnavailable(Unavailable):
    """The outcome of some changes of a commit is unknown; `verdicts` has None in their places."""

    def __init__(self, cause: str, verdicts: Sequence[Verdict | None]) -> None:
        super().__init__(cause)
        self.verdicts = verdicts


class QueueGone(ConveyorError):
    """The queue of a run does not exist: ended, or not made yet. The run's row tells which."""


class BlobMissing(ConveyorError):
    """No body lies under this key."""


class StorageFull(Unavailable):
    """The disk is full. Nothing was written."""
