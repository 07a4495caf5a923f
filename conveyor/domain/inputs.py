"""Uploaded lists: how one is to be read, the slot it is put into, and the copy a job keeps of it
(SPEC 4.13)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.ids import BatchId, CallerId, InputId, RunId

Column = int | str
"""A column of a CSV file: its position from 0, or its name in the header."""


class ListFormat(StrEnum):
    CSV = "csv"
    NDJSON = "ndjson"
    TEXT = "text"


class ListSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the bytes of a list are to be read; all but the format is about CSV."""

    format: ListFormat
    url: Column = 0
    external_id: Column | None = None
    header: bool = False
    delimiter: str = ","
    quote: str = '"'


class JobInput(msgspec.Struct, frozen=True):
    """A slot for one uploaded list. What was put into it is a blob, not a matter of this row."""

    input_id: InputId
    caller: CallerId
    spec: ListSpec
    created_at: float
    expires_at: float


class UploadedList(msgspec.Struct, frozen=True, tag="uploaded"):
    """A batch that is read from the job's own copy of an upload, as it was at submit."""

    key: str
    spec: ListSpec
    size_bytes: int
    sha256: str
    origin_run_id: RunId
    origin_batch_id: BatchId


def slot_prefix(input_id: InputId) -> str:
    """Where everything that was put into a slot lies."""
    return f"inputs/{input_id}"


def slot_key(input_id: InputId) -> str:
    return f"{slot_prefix(input_id)}/list"
