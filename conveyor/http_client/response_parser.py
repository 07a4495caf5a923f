"""Parses one response with httptools and enforces the rules that make its framing unambiguous.

If two parsers can disagree about the end of a body, an attacker can smuggle a response, and a
connection gets out of step. The parser therefore refuses a response with two framings, and the pool
never reuses a connection that delivered one byte too many.
"""

from __future__ import annotations

import httptools

from conveyor.http_client.errors import BadResponse, ConnectionLost

# Bounds the memory and the CPU time of a head.
HEADERS_MAX = 256
# Bounds the bytes of headers and chunk framing that carry no body. Without it, a peer could send
# headers or chunk extensions until the deadline.
OVERHEAD_BYTES_MAX = 128 * 1024
# The least efficient honest framing is a chunk of one byte: six bytes on the connection.
_WIRE_PER_BODY_BYTE = 6
_BODYLESS = frozenset({204, 304})


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
        "_wire_bytes",
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
        self._wire_bytes = 0
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
        return self._wire_bytes > 0

    def feed(self, data: bytes) -> None:
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadResponse("the server switched protocols") from None
        except httptools.HttpParserError as error:
            self._judge(error)
        overhead = self._wire_bytes - _WIRE_PER_BODY_BYTE * self._body_bytes
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
        if not self._has_body or self.status in _BODYLESS:
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
            self._is_until_close = self.status not in _BODYLESS

    def _judge(self, error: httptools.HttpParserError) -> None:
        if self.is_done:
            self._is_dirty = True
            return
        # httptools wraps an exception that a callback raised. Raise the callback's own error.
        cause = error.__context__
        if isinstance(cause, BadResponse):
            raise cause from None
        raise BadResponse(f"not a valid HTTP response: {error}") from None
