"""ExportSink: puts the file of an export where its caller wants it (SPEC.md 4.19)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from conveyor.domain.export_record import Destination
from conveyor.ports.webhook_sender import Delivered, NotDelivered


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingFile:
    """A file to put. `partition` names the caller: files of two callers share no connection."""

    destination: Destination = field(repr=False)
    partition: str
    content_type: str
    size_bytes: int
    pieces: AsyncIterator[bytes] = field(repr=False)


class ExportSink(Protocol):
    """Laws:

    - Putting twice is safe: the object is replaced by the same bytes.
    - The outcome is a value; no redirect is followed; no credential is part of an error.
    - Only addresses that webhooks may reach are connected to.
    - An error of `pieces` is raised as it is. Unavailable is raised if this process could not make
      the call: then there was no attempt.
    """

    async def put(self, file: OutgoingFile) -> Delivered | NotDelivered: ...
