"""A route: one operation as data. The application and the OpenAPI document both read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from conveyor.api.server.request import Read, RequestContext, Response, StreamHandler, Work, Write
from conveyor.api.streaming_submit import StreamingSubmit
from conveyor.domain import limits


class Access(Enum):
    """The credentials that a route requires."""

    KEY = "an API key"
    LINK = "an API key, or the token of a signed link"
    PUBLIC = "nothing"


@dataclass(frozen=True, slots=True)
class Query:
    """A route that reads and changes nothing."""

    handler: Read


@dataclass(frozen=True, slots=True)
class Command:
    """A route that changes state. The application checks the request first, then runs the work
    under a shield, once per Idempotency-Key.

    A body with `is_body_optional` may be left out. With `is_secret`, the response is encrypted
    while it is stored for replay. `long` handles a list that is too long for the memory of the
    handler.
    """

    handler: Write
    payload: type | None = None
    is_body_optional: bool = False
    is_secret: bool = False
    long: type[StreamingSubmit] | None = None


def make_handler(work: Callable[[RequestContext, str], Awaitable[Response]]) -> Write:
    """Makes the handler of a command that has nothing to check before its work begins."""

    def handler(call: RequestContext) -> Work:
        return partial(work, call)

    return handler


@dataclass(frozen=True, slots=True)
class Upload:
    """Streams a large body. If the upload is interrupted, nothing is stored."""

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
    "Only report what the request would do (200). Nothing is created, no Idempotency-Key is used.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A request that the document shows. A test sends it, with the ids of a prepared job in its
    path. `body` is JSON, or the text of an upload. `status` is the expected one, if the operation
    has several."""

    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation. `problems` has the statuses of refusals that do not follow from the form of
    the route (see `openapi`). `gives` maps each id in its response to the JSON pointer of the id.
    The document links the operation to those that need such an id."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    description: str
    does: Query | Command | Upload
    answers: Mapping[int, type | str | None]
    problems: tuple[int, ...] = ()
    query: tuple[Parameter, ...] = ()
    access: Access = Access.KEY
    gives: Mapping[str, str] = field(default_factory=dict)
    example: Example = Example()


# Query parameters that several routes share.
CURSOR = Parameter(
    "cursor", {"type": "string", "minLength": 1}, "The `next_cursor` of the previous page."
)
LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": limits.LIST_ROWS_MAX, "default": limits.LIST_ROWS},
    "The largest number of rows in the response.",
)
