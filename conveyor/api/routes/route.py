"""A route: one operation, as data that the application and the document both read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conveyor.api.server.request_context import Read, StreamHandler, Write
from conveyor.api.streaming_submit import StreamingList
from conveyor.domain import limits

SMALL_BYTES_MAX = 64 * 1024


class Access(Enum):
    """What a route asks of its callers."""

    KEY = "an API key"
    LINK = "an API key, or the token of a signed link"
    PUBLIC = "nothing"


@dataclass(frozen=True, slots=True)
class Query:
    """Looks, and changes nothing."""

    handler: Read


@dataclass(frozen=True, slots=True)
class Command:
    """Changes something: checked first, then done under a shield, once per Idempotency-Key.

    An answer that is secret is sealed while it is kept to be replayed. `long` takes a list that is
    too long for the handler.
    """

    handler: Write
    payload: type | None = None
    is_secret: bool = False
    long: StreamingList | None = None

    @property
    def body_bytes_max(self) -> int:
        return limits.REQUEST_BYTES_MAX if self.payload else SMALL_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Upload:
    """Takes a large body as it comes. Cut off, it has not happened."""

    handler: StreamHandler
    body_bytes_max: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter, as the document describes it."""

    name: str
    schema: Mapping[str, Any]
    description: str


DRY_RUN = Parameter(
    "dry_run",
    {"type": "boolean", "default": False},
    "Only tell what would happen (200); nothing is created, and an Idempotency-Key is not used.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation. `gives` names the ids in its answer, and where: whoever has one can go on to
    the operations that ask for it."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    does: Query | Command | Upload
    answers: Mapping[int, type | str | None]
    problems: tuple[int, ...] = ()
    query: tuple[Parameter, ...] = ()
    access: Access = Access.KEY
    gives: Mapping[str, str] = field(default_factory=dict)


# Query parameters that several tables of routes share.


CURSOR = Parameter(
    "cursor", {"type": "string", "minLength": 1}, "The `next_cursor` of the page before."
)
LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": limits.LIST_ROWS_MAX, "default": limits.LIST_ROWS},
    "How many to answer with at most.",
)
