"""One request in the form that handlers get, and the two kinds of their responses
(docs/api.md, Conventions)."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from conveyor.api.server.auth import Authenticator, Principal
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import CallerId
from conveyor.http_client.large_bodies import Decoding
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.quota import StorageQuotas

if TYPE_CHECKING:
    from conveyor.api.server.quota import RequestQuotas

JSON = "application/json"
# The longest download of one body. A slow client must not hold a connection for ever.
DOWNLOAD_TIMEOUT_S = 600


@dataclass(slots=True)
class Sent:
    """The bytes of a body that have arrived, counted before decompression."""

    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The state that the routes of one application share."""

    env: Context
    auth: Authenticator
    notifier: WebhookSender
    metrics: Metrics
    is_ready: Callable[[], bool]
    inspect: Callable[[], object] | None
    document: bytes
    decoding: Decoding
    requests: RequestQuotas
    storage: StorageQuotas


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One parsed request. `principal` is None only if the route or the link needs no key.

    Header names are in lower case. `address` is the address of the client, if it is known.
    """

    api: Api
    principal: Principal | None
    ids: Mapping[str, str]
    query: Mapping[str, Sequence[str]]
    base_url: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: Sent = field(default_factory=Sent)
    address: str | None = None

    @property
    def env(self) -> Context:
        return self.api.env

    @property
    def caller(self) -> CallerId:
        assert self.principal is not None
        return self.principal.caller

    def parameter(self, name: str) -> str | None:
        """Returns a query parameter. A parameter that occurs twice is refused."""
        values = self.query.get(name, ())
        if len(values) > 1:
            raise InvalidArgument(f"{name} may be given once.", pointer=f"/{name}")
        return values[0] if values else None

    @property
    def is_dry_run(self) -> bool:
        """Whether the caller asks for a dry run, which changes nothing."""
        return self.flag("dry_run")

    def flag(self, name: str) -> bool:
        text = self.parameter(name)
        if text not in {None, "true", "false"}:
            raise InvalidArgument(f"{name} must be true or false.", pointer=f"/{name}")
        return text == "true"

    def limit(self, *, default: int, limit_max: int) -> int:
        text = self.parameter("limit")
        if text is None:
            return default
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        if not is_number or not 1 <= int(text) <= limit_max:
            raise InvalidArgument(
                f"limit must be a whole number from 1 to {limit_max}.", pointer="/limit"
            )
        return int(text)


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response."""

    status: int
    content: bytes = b""
    media_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Download:
    """A response whose body is streamed."""

    pieces: AsyncGenerator[bytes, None]
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    timeout_s: int | None = DOWNLOAD_TIMEOUT_S


Work = Callable[[str], Awaitable[Response]]
Read = Callable[[RequestContext], Awaitable[Response | Download]]
Write = Callable[[RequestContext], Work]
StreamHandler = Callable[[RequestContext, AsyncIterable[bytes]], Awaitable[Response]]


def json_reply(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(body))
