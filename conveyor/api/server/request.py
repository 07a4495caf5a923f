"""One request: the form that handlers get, its body, and the two kinds of responses
(docs/api.md, Conventions).

The size, the duration and the type of a body are limited while it is read.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, cast

import msgspec
import trio
from quart import Request

from conveyor.api.server.auth import Authenticator, Principal
from conveyor.api.server.problem import LengthRequired, TooLarge, TooSlow, UnsupportedMedia
from conveyor.api.server.quota import RequestQuotas
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import CallerId
from conveyor.http_client.errors import BadEncoding, BodyTooLarge
from conveyor.http_client.large_bodies import INLINE_ENCODED_BYTES_MAX, Decoding
from conveyor.http_client.response_body import Decoder, Gzip
from conveyor.http_server.exchange import BODY_TAKEN
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.quota import StorageQuotas
from conveyor.usecases.run.run_progress import RunFigures

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
    document: Callable[[], bytes]
    decoding: Decoding
    requests: RequestQuotas
    storage: StorageQuotas
    run_figures: RunFigures = field(default_factory=RunFigures)


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
            raise InvalidArgument(f"Send {name} only once.", pointer=f"/{name}")
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


# A body has this time, plus a second per 64 KiB that arrived. Smaller values cut off slow clients;
# larger ones let a client hold a connection with a few bytes.
BODY_TIMEOUT_S = 30.0
BYTES_PER_S_MIN = 64 * 1024
# No real list compresses better than this, unless it is short.
INFLATION_MAX = 100
INFLATION_FREE_BYTES = 100_000

_PLAIN, _GZIP = "identity", "gzip"
# The output of one step, which takes about a millisecond.
_INFLATED_BYTES = 256 * 1024


def require_json(request: Request) -> None:
    """Refuses a body that is not declared as JSON in UTF-8, before a byte is read."""
    if request.mimetype != "application/json":
        raise UnsupportedMedia("Send the body as application/json.")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in {"utf-8", "utf8"}:
        raise UnsupportedMedia("JSON must be UTF-8. Omit the charset.")


def require_plain(request: Request) -> None:
    if _encoding(request) != _PLAIN:
        raise UnsupportedMedia("Send the body without a Content-Encoding.")


def _encoding(request: Request) -> str:
    return request.headers.get("Content-Encoding", "").strip().lower() or _PLAIN


async def body_pieces(
    request: Request, *, bytes_max: int, sent: Sent, decoding: Decoding, partition: str
) -> AsyncGenerator[bytes, None]:
    """Yields the body while it arrives, and decodes gzip.

    The CPU time counts against the share of the caller `partition`. A large body has more time to
    arrive. A body below the minimum rate raises TooSlow. `sent` counts the bytes that arrived.
    """
    encoding = _encoding(request)
    if encoding not in {_PLAIN, _GZIP}:
        raise UnsupportedMedia("Send the body plain or as gzip.")
    async with aclosing(_pieces(request, bytes_max, sent)) as pieces:
        if encoding == _PLAIN:
            async for piece in pieces:
                yield piece
            return
        # The ratio is checked below, with an exception for short lists.
        decoder = Decoder(Gzip(), bytes_max, ratio_max=inf)
        inflated_bytes = 0
        async for piece in pieces:
            is_small = sent.size_bytes <= INLINE_ENCODED_BYTES_MAX
            step = partial(_inflate_step, decoder.decode(piece), bytes_max)
            while plain := step() if is_small else await decoding.run(partition, step):
                await trio.lowlevel.checkpoint()
                inflated_bytes += len(plain)
                if inflated_bytes > max(INFLATION_MAX * sent.size_bytes, INFLATION_FREE_BYTES):
                    raise TooLarge(
                        f"The body inflates to more than {INFLATION_MAX} times its size."
                    )
                yield plain
        _finish(decoder)


def _inflate_step(plain_pieces: Iterator[bytes], bytes_max: int) -> bytes:
    """Returns some output of a piece; empty at its end."""
    plain = bytearray()
    try:
        for plain_piece in plain_pieces:
            plain += plain_piece
            if len(plain) >= _INFLATED_BYTES:
                break
    except BodyTooLarge:
        raise _too_large(bytes_max) from None
    except BadEncoding as error:
        raise _not_gzip(error) from None
    return bytes(plain)


def _finish(decoder: Decoder) -> None:
    try:
        decoder.finish()
    except BadEncoding as error:
        raise _not_gzip(error) from None


def _not_gzip(error: BadEncoding) -> InvalidArgument:
    return InvalidArgument(f"The body cannot be inflated: {error.detail}.")


async def read_start(pieces: AsyncIterable[bytes], *, bytes_max: int) -> tuple[bytes, bool]:
    """Reads until the body exceeds `bytes_max` or ends. Returns it and whether it ended."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > bytes_max:
            return bytes(body), False
    return bytes(body), True


async def take_body(request: Request, *, bytes_max: int) -> AsyncGenerator[bytes, None]:
    """Yields the body, no faster than the caller consumes it. It requires a Content-Length."""
    left = request.content_length
    if left is None:
        raise LengthRequired("Send a Content-Length with the length of the body.")
    async with aclosing(_pieces(request, bytes_max, Sent())) as pieces:
        async for piece in pieces:
            left -= len(piece)
            yield piece
    if left:
        raise InvalidArgument("The length of the body differs from its Content-Length.")


async def _pieces(request: Request, bytes_max: int, sent: Sent) -> AsyncGenerator[bytes, None]:
    if request.content_length is not None and request.content_length > bytes_max:
        raise _too_large(bytes_max)
    size_bytes = 0
    begun_at = trio.current_time()
    body = aiter(request.body)
    while True:
        deadline = begun_at + BODY_TIMEOUT_S + size_bytes / BYTES_PER_S_MIN
        piece = b""
        with trio.move_on_at(deadline) as scope:
            piece = await anext(body, b"")
        if scope.cancelled_caught:
            raise TooSlow("The body did not arrive in time.")
        if not piece:
            return
        _report_taken(request, len(piece))
        size_bytes += len(piece)
        sent.size_bytes = size_bytes
        if size_bytes > bytes_max:
            raise _too_large(bytes_max)
        yield piece


def _report_taken(request: Request, size_bytes: int) -> None:
    """Allows the server to read more. A test client has no server."""
    scope = cast("dict[str, Any]", request.scope)
    if (report := scope.get(BODY_TAKEN)) is not None:
        report(size_bytes)


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"The body may have at most {bytes_max} bytes.")
