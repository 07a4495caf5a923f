"""What can go wrong between Conveyor and the world, whatever the engine (SPEC 5.1)."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError


class Unavailable(ConveyorError):
    """The engine did not answer in time, or said no for now. The outcome of a write is unknown."""


class QueueGone(ConveyorError):
    """The queue of a run does not exist: ended, or not made yet. The run's row tells which."""


class BlobMissing(ConveyorError):
    """No body lies under this key."""


class StorageFull(Unavailable):
    """The disk is full. Nothing was written."""
