"""One request and its response on a connection: values, framing, and the timer of all waits.

If two parsers can disagree about the end of a body, an attacker can smuggle a response, and a
connection gets out of step. The parser, which is httptools with stricter rules, therefore refuses a
response with two framings, and the pool never reuses a connection that delivered one byte too many.

A cancel scope for each request would cost as much as the rest of the request. Each fetch therefore
registers the time until which it waits, and a single task wakes at the earliest of these times and
interrupts the waits that are due. The task starts with the first registered wait and ends when none
is left.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Protocol

import httptools
import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.submit.charset import looks_like_html
from conveyor.domain.submit.target import Target
from conveyor.http_client.connection_limits import Rate
from conveyor.http_client.errors import (
    TOO_LATE,
    TOO_SLOW,
    BadRequest,
    BadResponse,
    ConnectionLost,
    TimedOut,
    TooSlow,
)
from conveyor.http_client.stream import TcpStream, TlsStream
from conveyor.ports.gateway import PageMemory

Headers = Sequence[tuple[str, str]]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BODYLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
# A header name is a `token` of RFC 9110, 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
# A header value has no control character but the tab: CR or LF would start another header. It has
# no surrogate, which cannot be encoded. \Z and not $: $ would accept a line feed at the end.
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*\Z")
# The client writes these itself. A caller that sets them could change where a request ends.
_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade"})


def wants_every_body(_status: int) -> bool:
    return True


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    If `wants_body(status)`, the response has the whole decoded body, of at most `body_bytes_max`
    bytes. Of any other response only the first 64 KiB are read. A timeout of None means the
    timeout of the pool. `partition` names the caller: two partitions share no connection and no
    TLS session. With `memory`, a large body counts as in memory until that is released.
    """

    method: str
    target: Target
    partition: str = ""
    headers: Headers = ()
    body: bytes | None = None
    deadline_s: float = limits.SCRAPE_DEADLINE_S
    body_bytes_max: int = limits.BODY_BYTES_MAX
    wants_body: Callable[[int], bool] = wants_every_body
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None
    memory: PageMemory | None = None

    @property
    def is_idempotent(self) -> bool:
        return self.method in {"GET", "HEAD"}

    def __repr__(self) -> str:
        # Queries and headers contain secrets, and logs contain reprs.
        return f"Request({self.method} {self.target.scheme}://{self.target.authority})"


class Upload(msgspec.Struct, frozen=True):
    """A body of known length in pieces. It can be sent only once."""

    pieces: AsyncIterator[bytes]
    size_bytes: int


class Response(msgspec.Struct, frozen=True):
    """A response. Header names are in lower case. `is_whole` is False if the body was cut."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    is_whole: bool = True

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return _text_from(value)
        return None

    @property
    def content_type(self) -> str:
        return plausible_content_type(self.header(b"content-type"), self.body)


def plausible_content_type(stated: str | None, body: bytes) -> str:
    """Returns the content type that a site states, or octet-stream if it is not plausible. If it
    states none, a body that begins like HTML is HTML."""
    if not stated and looks_like_html(body):
        return "text/html"
    # The type is stored and sent to callers, so control characters and long texts are refused.
    text = stated or ""
    is_plausible = text.isascii() and text.isprintable() and 0 < len(text) <= 256
    return text if is_plausible else "application/octet-stream"


# A larger body is sent after the head instead of with it: the joined message would be a copy of the
# body in memory. Below it, one more system call costs more than the copy.
_JOINED_BODY_BYTES_MAX = 256 * 1024


def encode_request(request: Request, upload_bytes: int | None = None) -> tuple[bytes, ...]:
    """Encodes head and body in one piece, so that one send, and if it fits one packet, is enough. A
    large body is a second piece.

    `upload_bytes` is the length of a body that the caller sends afterwards. Raises BadRequest.
    """
    if request.method not in _METHODS:
        raise BadRequest("the method is not supported")
    target = request.target
    lines = [f"{request.method} {target.path_and_query} HTTP/1.1\r\nHost: {target.authority}\r\n"]
    for name, value in request.headers:
        if not is_header(name, value) or name.lower() in _FRAMING:
            raise BadRequest("a request header is not allowed")
        lines.append(f"{name}: {value}\r\n")
    body = request.body
    if upload_bytes is not None:
        lines.append(f"Content-Length: {upload_bytes}\r\n")
    elif body is not None or request.method not in _BODYLESS_METHODS:
        lines.append(f"Content-Length: {len(body or b'')}\r\n")
    lines.append("\r\n")
    head = "".join(lines).encode()
    if not body:
        return (head,)
    return (head + body,) if len(body) <= _JOINED_BODY_BYTES_MAX else (head, body)


def is_header(name: str, value: str) -> bool:
    return _TOKEN.match(name) is not None and _VALUE.match(value) is not None


def _text_from(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


# Bounds the memory and the CPU time of a head.
HEADERS_MAX = 256
# Bounds the bytes of headers and chunk framing that carry no body. Without it, a peer could send
# headers or chunk extensions until the deadline.
OVERHEAD_BYTES_MAX = 128 * 1024
# The least efficient honest framing is a chunk of one byte: six bytes on the connection.
_RECEIVED_PER_BODY_BYTE = 6
_BODYLESS_STATUSES = frozenset({204, 304})


class ResponseParser:
    """Parses bytes into `status`, `headers` and pieces of the body, which is not yet decoded."""

    __slots__ = (
        "_body_bytes",
        "_fields",
        "_has_body",
        "_has_interim",
        "_is_dirty",
        "_is_keep_alive",
        "_is_until_close",
        "_parser",
        "_received_bytes",
        "content_length",
        "encodings",
        "headers",
        "is_done",
        "is_head_done",
        "pieces",
        "status",
    )

    def __init__(self, *, has_body: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.encodings: list[bytes] = []
        self.content_length: int | None = None
        self.is_head_done = False
        self.is_done = False
        self._has_body = has_body
        self._has_interim = False
        self._is_dirty = False
        self._is_keep_alive = False
        self._is_until_close = False
        self._fields: list[tuple[bytes, bytes]] = []
        self._received_bytes = 0
        self._body_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_reusable(self) -> bool:
        """Whether the response ended exactly at the last byte received and allows keep-alive."""
        return self.is_done and self._is_keep_alive and not self._is_dirty

    @property
    def has_surplus(self) -> bool:
        """Whether the peer sent more bytes than the response."""
        return self._is_dirty

    @property
    def has_oddities(self) -> bool:
        """Whether a peer with a wrong implementation of HTTP could still send bytes.

        These are the body of a response to HEAD, or a second response after a status 1xx that the
        peer meant as final.
        """
        return not self._has_body or self._has_interim

    @property
    def has_started(self) -> bool:
        return self._received_bytes > 0

    def feed(self, data: bytes) -> None:
        self._received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadResponse("the server switched protocols") from None
        except httptools.HttpParserError as error:
            self._judge(error)
        overhead = self._received_bytes - _RECEIVED_PER_BODY_BYTE * self._body_bytes
        if overhead > OVERHEAD_BYTES_MAX and not self.is_done:
            raise BadResponse("headers or framing are too large")

    def take(self) -> bytes:
        """Returns the body bytes that arrived since the last call."""
        pieces = self.pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return data

    def end_of_stream(self) -> None:
        if not (self.is_head_done and self._is_until_close):
            raise ConnectionLost("the connection closed before the response was complete")
        self.is_done = True

    def close(self) -> None:
        """Drops the httptools parser. It refers back to this object, and only the cyclic garbage
        collector would free the pair.
        """
        del self._parser

    def on_message_begin(self) -> None:
        # A message after the end of the response: the peer sent a second one unasked.
        self._is_dirty = self.is_done

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))
        if len(self._fields) > HEADERS_MAX:
            raise BadResponse("more than 256 headers")

    def on_headers_complete(self) -> None:
        if self.is_done:
            return
        self.status = self._parser.get_status_code()
        headers, self._fields = self._fields, []
        if self.status < 200:
            if self.status < 100:
                raise BadResponse("the status is not a number from 100")
            self._has_interim = True
            return
        self.headers = headers
        self._frame()
        if not self._has_body or self.status in _BODYLESS_STATUSES:
            # These headers describe the body that a GET would have returned.
            self.content_length = None
            self.encodings.clear()
        # Ask now: llhttp resets this after the message, and no connection would ever be kept.
        self._is_keep_alive = self._parser.should_keep_alive()
        self.is_head_done = True
        if not self._has_body:
            self.is_done = True

    def on_body(self, data: bytes) -> None:
        if self.is_done:
            self._is_dirty = True
            return
        self._body_bytes += len(data)
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        if self.is_head_done:
            self.is_done = True

    def _frame(self) -> None:
        lengths: list[bytes] = []
        codings: list[bytes] = []
        for name, value in self.headers:
            if name == b"content-length":
                lengths.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
            elif name == b"content-encoding":
                self.encodings.append(value)
        version = self._parser.get_http_version()
        if version not in {"1.1", "1.0"}:
            raise BadResponse("not HTTP/1.x")
        if codings:
            if lengths or version == "1.0" or [c.strip().lower() for c in codings] != [b"chunked"]:
                raise BadResponse("the Transfer-Encoding leaves the length in doubt")
        elif lengths:
            if len(lengths) > 1 or not lengths[0].isdigit():
                raise BadResponse("the Content-Length leaves the length in doubt")
            self.content_length = int(lengths[0])
        else:
            self._is_until_close = self.status not in _BODYLESS_STATUSES

    def _judge(self, error: httptools.HttpParserError) -> None:
        if self.is_done:
            self._is_dirty = True
            return
        # httptools wraps an exception that a callback raised. Raise the callback's own error.
        cause = error.__context__
        if isinstance(cause, BadResponse):
            raise cause from None
        raise BadResponse(f"not a valid HTTP response: {error}") from None


# The timer task sleeps at least this long, so that it handles deadlines close together in one pass.
# A deadline can be missed by this much. A smaller value makes the task scan all waits more often.
GRAIN_S = 0.01


class Interruptible(Protocol):
    def interrupt(self) -> None:
        """Makes the current wait, if there is one, raise TimedOut."""
        ...


class DeadlineTimer:
    """Interrupts waits at their deadlines.

    An entry stays until its owner calls `forget` or `expect`: an interruption that falls between
    two waits has no effect, and the next pass repeats it.
    """

    def __init__(self) -> None:
        self._until: dict[Interruptible, float] = {}
        self._next = inf
        self._alarm: trio.CancelScope | None = None

    def expect(self, waiting: Interruptible, until: float) -> None:
        """Interrupts `waiting` at `until`, unless `forget` or a later `expect` comes first."""
        self._until[waiting] = until
        if until < self._next:
            self._wake_at(until)

    def forget(self, waiting: Interruptible) -> None:
        self._until.pop(waiting, None)

    def _wake_at(self, moment: float) -> None:
        if self._alarm is not None:
            self._next = self._alarm.deadline = moment
        else:
            self._next = -inf  # The new task scans all entries; start no second one until then.
            trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        try:
            while self._until:
                self._next = self._interrupt_due(trio.current_time())
                with trio.CancelScope(deadline=self._next) as self._alarm:
                    await trio.sleep_forever()
        finally:
            self._alarm, self._next = None, inf

    def _interrupt_due(self, now: float) -> float:
        """Interrupts the waits that are due and returns the time of the next pass."""
        following = inf
        for waiting, until in self._until.items():
            if until <= now:
                waiting.interrupt()
            following = min(following, until)
        return max(following, now + GRAIN_S)


# The exchange reads a response from a connection under an idle timeout and a total deadline.


class Exchange:
    """One request and its response on one connection.

    The timer covers every wait for the peer and nothing else. `is_early` is set when the peer sent
    bytes before it had the whole request.
    """

    __slots__ = (
        "_rate",
        "_rate_since",
        "_received_bytes",
        "_timer",
        "_wait_s",
        "_waiting_since",
        "deadline",
        "is_early",
        "parser",
        "stream",
    )

    def __init__(
        self,
        stream: TcpStream | TlsStream,
        parser: ResponseParser,
        timer: DeadlineTimer,
        *,
        deadline: float,
        wait_s: float,
    ) -> None:
        self.stream = stream
        self.parser = parser
        self.deadline = deadline
        self.is_early = False
        self._timer = timer
        self._wait_s = wait_s
        self._rate: Rate | None = None
        self._received_bytes = 0
        self._rate_since: float | None = None
        self._waiting_since: float | None = None

    def require_rate(self, rate: Rate) -> None:
        """From the next wait on, a peer below this rate raises TooSlow. A second call restarts the
        measurement.
        """
        self._rate = rate
        self._rate_since = None
        self._received_bytes = 0

    def change_rate(self, rate: Rate) -> None:
        """Changes the rate without a restart. It applies to the current wait as well."""
        self._rate = rate
        if self._waiting_since is not None:
            self._timer.expect(self.stream, self._until(self._waiting_since))

    def excuse(self, seconds: float) -> None:
        """Excludes `seconds` from the measurement: the client did not read during this time."""
        if self._rate_since is not None:
            self._rate_since += seconds

    async def send(self, message: tuple[bytes, ...], upload: Upload | None = None) -> None:
        """Sends the request and reads until the head of the response has arrived."""
        self._start_timer()
        for piece in message:
            await self.stream.send(piece)
        if upload is not None:
            try:
                await self._send_all(upload)
            except ConnectionLost:
                # The peer may have sent its refusal before it closed the connection on the body.
                self._start_timer()
        await self._receive()
        while not self.parser.is_head_done:
            await self.read_more()

    async def _send_all(self, upload: Upload) -> None:
        """Sends the pieces. The timer runs while the peer receives, not while a piece is made."""
        self.stop_timer()
        left = upload.size_bytes
        async for piece in upload.pieces:
            left -= len(piece)
            # Bytes beyond the announced length would be read by the peer as the next request.
            if left < 0:
                break
            self.is_early = self.is_early or not self.stream.is_quiet()
            self._start_timer()
            await self.stream.send(piece)
            self.stop_timer()
        if left:
            raise BadRequest("the body is not as long as was announced")
        self._start_timer()

    async def read_more(self) -> None:
        now = trio.current_time()
        if now >= self.deadline:
            raise TimedOut(TOO_LATE)
        if self._rate_since is None:
            self._rate_since = now
        if now >= self._slow_at():
            raise TooSlow(TOO_SLOW)
        self._waiting_since = now
        try:
            self._received_bytes += await self._receive_in_time(now)
        finally:
            self._waiting_since = None

    async def _receive_in_time(self, since: float) -> int:
        while True:
            self._timer.expect(self.stream, self._until(since))
            try:
                return await self._receive()
            except TimedOut:
                now = trio.current_time()
                if now >= self._slow_at():
                    raise TooSlow(TOO_SLOW) from None
                if now >= self._until(since):
                    raise
                # `change_rate` moved the deadline back after the timer interrupted this wait and
                # before this task ran. Wait again.

    def stop_timer(self) -> None:
        """The caller calls this before it does anything that is not a wait for the peer."""
        self._timer.forget(self.stream)

    def _start_timer(self) -> None:
        """Gives the peer `wait_s` from now, but not beyond the total deadline."""
        now = trio.current_time()
        if now >= self.deadline:
            raise TimedOut(TOO_LATE)
        self._timer.expect(self.stream, min(now + self._wait_s, self.deadline))

    def _until(self, since: float) -> float:
        """The time at which a wait that began at `since` is too long."""
        return min(since + self._wait_s, self.deadline, self._slow_at())

    def _slow_at(self) -> float:
        if self._rate is None or self._rate_since is None:
            return inf
        return self._rate_since + self._rate.seconds_for(self._received_bytes)

    async def _receive(self) -> int:
        data = await self.stream.receive()
        if data:
            self.parser.feed(data)
        else:
            self.parser.end_of_stream()
        return len(data)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Deadline for waits without a connected peer. DeadlineTimer covers the others."""
    with trio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise TimedOut(TOO_LATE)


# Bodies that are too large for memory are read piece by piece.


class StreamingResponse:
    """The head of a response. Iteration yields its body, not decoded and without a size limit."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.status = exchange.parser.status
        self.headers: Sequence[tuple[bytes, bytes]] = exchange.parser.headers

    def __aiter__(self) -> StreamingResponse:
        return self

    async def __anext__(self) -> bytes:
        exchange = self._exchange
        while not (data := exchange.parser.take()):
            if exchange.parser.is_done:
                raise StopAsyncIteration
            await exchange.read_more()
            # The time that the consumer needs between two pieces is not a delay of the peer.
            exchange.stop_timer()
        return data
