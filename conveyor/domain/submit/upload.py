"""Uploaded lists: how one is to be read, the slot it is put into, and the copy a job keeps of it
(docs/api.md, Uploaded lists)."""

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

    format: ListFormat  #: csv, ndjson or text.
    url: Column = 0  #: The CSV column of the URL.
    external_id: Column | None = None  #: The CSV column of the external id.
    header: bool = False  #: Whether the first CSV row names the columns.
    delimiter: str = ","  #: The character between CSV cells.
    quote: str = '"'  #: The character around quoted CSV cells.


class JobInput(msgspec.Struct, frozen=True):
    """A slot for one uploaded list. What was put into it is a blob, not a matter of this row."""

    input_id: InputId  #: ULID of the file input.
    caller: CallerId  #: The caller that owns it.
    spec: ListSpec  #: How the uploaded list is read.
    created_at: float  #: When it was created.
    expires_at: float  #: When it counts as absent.


class UploadedList(msgspec.Struct, frozen=True, tag="uploaded"):
    """A batch that is read from the job's own copy of an upload, as it was at submit."""

    key: str  #: The blob with the job's own copy.
    spec: ListSpec  #: How the list is read.
    size_bytes: int  #: Its length at submit.
    sha256: str  #: Its digest at submit.
    origin_run_id: RunId  #: The run that the task ids derive from.
    origin_batch_id: BatchId  #: The batch that the task ids derive from.


def slot_prefix(input_id: InputId) -> str:
    """Where everything that was put into a slot lies."""
    return f"inputs/{input_id}"


def slot_key(input_id: InputId) -> str:
    return f"{slot_prefix(input_id)}/list"
