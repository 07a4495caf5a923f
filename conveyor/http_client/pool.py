"""HttpPool: sends requests and returns responses over connections that it keeps and reuses; and the
redirects that lead from one request to the next.

The package docstring explains the design. The laws:
- The pool opens a socket only to an address that the policy allowed in the same resolution (or in
  a cached one, which the resolver checked before it stored it).
- A fetch ends within its deadline. A cancelled fetch closes its connection immediately.
- A connection serves one caller. The pool never sends another caller's request on it.
- The pool reuses a connection only if the last response ended exactly at the last byte received.
  Unless the peers are trusted, it does not reuse a connection after a request with a body, after a
  HEAD, or after an interim response. A peer that sent more bytes than one response gets a new
  connection for each request for the next `DISTRUST_S` seconds.
- The pool sends only a GET or HEAD twice, and only if the idle connection was lost before the
  first byte of the response.
- No environment variable sets a proxy.

The connection goes to an address, never to a name: a name would be resolved a second time, without
the check. TLS verifies the certificate against the host name.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import msgspec
import trio

from conveyor.domain.submit.target import BadUrl, Target, TargetPolicy, join, parse_url
from conveyor.http_client.connection_limits import ConnectionLimits, OriginPool, PoolLimits
from conveyor.http_client.cookies import Cookies
from conveyor.http_client.errors import BadRedirect, BadResponse, ConnectionLost
from conveyor.http_client.exchange import (
    DeadlineTimer,
    Exchange,
    Headers,
    Request,
    Response,
    ResponseParser,
    StreamingResponse,
    Upload,
    encode_request,
    until,
)
from conveyor.http_client.large_bodies import (
    INLINE_CPU_S_MAX,
    INLINE_ENCODED_BYTES_MAX,
    ArrivingBody,
    BodyMemory,
    Decoding,
)
from conveyor.http_client.resolver import Lookup, Resolver
from conveyor.http_client.response_body import EXCERPT_BYTES, WholeBody, excerpt, too_large
from conveyor.http_client.stream import Connect, Dialer, TcpStream, TlsStream, connect
from conveyor.ports.executor import Executor


class HttpPool:
    """The owner calls `close()` after the last fetch has ended. The pool holds sockets and no other
    resource. It decodes large bodies in `executor`, or in the event loop if there is none.
    """

    def __init__(
        self,
        policy: TargetPolicy,
        limits: PoolLimits | None = None,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        connect: Connect = connect,
        executor: Executor | None = None,
    ) -> None:
        limits = limits or PoolLimits()
        self.policy = policy
        self._limits = limits
        self._slots = ConnectionLimits(limits)
        self._timer = DeadlineTimer()
        self._body_memory = BodyMemory(limits)
        self._decoding = Decoding(executor)
        self._resolver = Resolver(policy, lookup)
        self._dialer = Dialer(self._resolver, tls, limits.connect_timeout_s, connect)

    @property
    def idle_count(self) -> int:
        return self._slots.idle_count

    @property
    def origin_count(self) -> int:
        """The number of (caller, origin) pairs that have connections or wait for one."""
        return self._slots.origin_count

    def close(self) -> None:
        self._slots.close_idle()

    async def resolve(self, target: Target, partition: str = "") -> tuple[str, ...]:
        """Returns the addresses that a request to `target` would be sent to.

        Raises ForbiddenTarget, NameNotResolved and OutOfResources.
        """
        return await self._resolver.resolve(target, partition)

    async def fetch(self, request: Request) -> Response:
        """Returns the response, with any status. Raises a subclass of FetchFailed."""
        message = encode_request(request)
        now = trio.current_time()
        deadline = now + request.deadline_s
        key = (request.partition, request.target.origin)
        # The common case takes a slot without an await and without a cancel scope.
        origin = self._slots.acquire_nowait(key)
        if origin is None:
            with until(deadline):
                origin = await self._slots.acquire(key)
            now = trio.current_time()
        try:
            idle = self._slots.pop_idle(origin, now)
            if idle is not None:
                exchange = self._make_exchange(idle, request, deadline)
                try:
                    return await self._exchange(origin, exchange, request, message)
                except ConnectionLost:
                    # A server may close an idle connection at any time. The request is repeated
                    # on a new connection only if a repetition is safe.
                    if exchange.parser.has_started or not request.is_idempotent:
                        raise
            stream = await self._dial(request, deadline)
            exchange = self._make_exchange(stream, request, deadline)
            response = await self._exchange(origin, exchange, request, message)
            # After the response: a TLS 1.3 server sends its session tickets after the handshake.
            self._dialer.remember(request.target, request.partition, stream)
            return response
        finally:
            self._slots.release(origin)

    @asynccontextmanager
    async def open(
        self, request: Request, upload: Upload | None = None
    ) -> AsyncGenerator[StreamingResponse, None]:
        """Yields the response while its body arrives.

        If the caller leaves the block before the end of the body, the connection is closed. An
        `upload` is never sent twice. Raises a subclass of FetchFailed.
        """
        message = encode_request(request, upload.size_bytes if upload else None)
        deadline = trio.current_time() + request.deadline_s
        with until(deadline):
            origin = await self._slots.acquire((request.partition, request.target.origin))
        try:
            exchange = await self._open_response(origin, request, message, deadline, upload)
            try:
                yield StreamingResponse(exchange)
            finally:
                exchange.stop_timer()
                exchange.parser.close()
                self._keep_or_close(origin, exchange, has_body=bool(request.body or upload))
        finally:
            self._slots.release(origin)

    async def _open_response(
        self,
        origin: OriginPool,
        request: Request,
        message: tuple[bytes, ...],
        deadline: float,
        upload: Upload | None,
    ) -> Exchange:
        """Returns an exchange whose response head has arrived, over an idle or a new connection."""
        idle = self._slots.pop_idle(origin, trio.current_time())
        if idle is not None:
            exchange = self._make_exchange(idle, request, deadline)
            try:
                return await _send(exchange, message, upload)
            except ConnectionLost:
                if exchange.parser.has_started or upload is not None or not request.is_idempotent:
                    raise
        stream = await self._dial(request, deadline)
        return await _send(self._make_exchange(stream, request, deadline), message, upload)

    async def _dial(self, request: Request, deadline: float) -> TcpStream | TlsStream:
        with until(deadline):
            # Evict before the connect, so that the new socket stays within `connections_max`.
            self._slots.evict_idle()
            return await self._dialer.dial(
                request.target, request.partition, request.connect_timeout_s
            )

    def _make_exchange(
        self, stream: TcpStream | TlsStream, request: Request, deadline: float
    ) -> Exchange:
        parser = ResponseParser(has_body=request.method != "HEAD")
        wait_s = request.read_timeout_s
        if wait_s is None:
            wait_s = self._limits.read_timeout_s
        return Exchange(stream, parser, self._timer, deadline=deadline, wait_s=wait_s)

    async def _exchange(
        self, origin: OriginPool, exchange: Exchange, request: Request, message: tuple[bytes, ...]
    ) -> Response:
        stream, parser = exchange.stream, exchange.parser
        try:
            await exchange.send(message)
            if request.wants_body(parser.status):
                response = await self._whole(exchange, request)
            else:
                exchange.require_rate(self._limits.body_rate_min)
                response = await _excerpt_response(exchange)
        except BaseException:
            # Cancellation included: a connection in the middle of a response is never reused.
            stream.close()
            raise
        finally:
            exchange.stop_timer()
            parser.close()
        self._keep_or_close(origin, exchange, has_body=bool(request.body))
        return response

    def _keep_or_close(self, origin: OriginPool, exchange: Exchange, *, has_body: bool) -> None:
        # The peer may still send bytes that the next request would read as its response.
        may_owe_bytes = (has_body or exchange.parser.has_oddities) and not self._limits.trusts_peers
        if exchange.parser.is_reusable and not exchange.is_early and not may_owe_bytes:
            self._slots.return_connection(origin, exchange.stream)
            return
        exchange.stream.close()
        if exchange.parser.has_surplus:
            self._slots.distrust(origin)

    async def _whole(self, exchange: Exchange, request: Request) -> Response:
        parser = exchange.parser
        if parser.is_done and not parser.encodings:
            # Most pages arrive in one read together with their head. They need no WholeBody.
            page = parser.take()
            if len(page) <= request.body_bytes_max:
                return Response(parser.status, parser.headers, page)
            raise too_large(request.body_bytes_max)
        body = WholeBody(parser.encodings, request.body_bytes_max)
        # Refuse an announced length before the first read: the transfer would be wasted.
        body.expect(parser.content_length)
        exchange.require_rate(self._limits.body_rate_min)
        memory = ArrivingBody(
            self._body_memory, request.partition, exchange, _bytes_max(parser, request)
        )
        try:
            while True:
                data = parser.take()
                if data and body.add(data):
                    await self._decode(body, exchange, request.partition, memory)
                if parser.is_done:
                    break
                size_bytes = max(body.size, body.encoded_bytes)
                if size_bytes > memory.covered_bytes:
                    await memory.grow(size_bytes)
                await exchange.read_more()
            page = body.finish()
            memory.close(request.memory, len(page))
        finally:
            memory.close()
        return Response(parser.status, parser.headers, page)

    async def _decode(
        self, body: WholeBody, exchange: Exchange, partition: str, memory: ArrivingBody
    ) -> None:
        """Decodes the added bytes: a small page in the event loop, a larger one in the executor."""
        is_small = body.encoded_bytes <= INLINE_ENCODED_BYTES_MAX
        if is_small and not body.decode_step(INLINE_CPU_S_MAX):
            return
        # Decoding is not a wait for the peer: the timer stops, and `excuse` below subtracts the
        # time from the peer's minimum rate.
        exchange.stop_timer()
        begun_at = trio.current_time()
        is_more = True
        while is_more:
            if body.size > memory.covered_bytes:
                await memory.grow(body.size)
            with until(exchange.deadline):
                is_more = await self._decoding.run(partition, body.decode_step)
        exchange.excuse(trio.current_time() - begun_at)


def _bytes_max(parser: ResponseParser, request: Request) -> int:
    """Returns the most bytes that the decoded body has."""
    if parser.content_length is None or parser.encodings:
        return request.body_bytes_max
    return parser.content_length


async def _send(exchange: Exchange, message: tuple[bytes, ...], upload: Upload | None) -> Exchange:
    try:
        await exchange.send(message, upload)
    except BaseException:
        exchange.stop_timer()
        exchange.parser.close()
        exchange.stream.close()
        raise
    exchange.stop_timer()
    return exchange


async def _excerpt_response(exchange: Exchange) -> Response:
    """Reads at most the first 64 KiB of a body that the caller does not want.

    If the body ends within this size, the connection can be reused.
    """
    parser = exchange.parser
    encoded = parser.take()
    try:
        while not parser.is_done and len(encoded) <= EXCERPT_BYTES:
            await exchange.read_more()
            encoded += parser.take()
    except (ConnectionLost, BadResponse):
        pass  # The status is known. The excerpt is optional, so its loss is no error.
    # Most of these bodies are answers to webhooks, which are not encoded and need no decoder.
    body = excerpt(parser.encodings, encoded) if parser.encodings else encoded[:EXCERPT_BYTES]
    return Response(parser.status, parser.headers, body, is_whole=parser.is_done)


# Redirects, and what each further request may contain (docs/engines.md, Gateways).
#
# A redirect from https to http is followed, because many sites have such redirects. Each hop is
# parsed, resolved and checked like the first URL. The caller's headers and body are sent only to
# the origin that they were meant for: any of them may be a credential, and the client cannot know
# which.

# A loop of redirects ends here. All hops share one deadline.
REDIRECTS_MAX = 5

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Headers that are sent to another origin too: a browser sends them to every site, so they contain
# no secret.
_PUBLIC = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})
# Hop-by-hop and framing headers. The HTTP client sets them; a caller's value could break the
# framing of the request.
_DROPPED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-language"})


class Followed(msgspec.Struct, frozen=True):
    """The last response of a chain of redirects, and the target that sent it."""

    response: Response
    target: Target


async def fetch_following(pool: HttpPool, request: Request) -> Followed:
    """Fetches, and follows each redirect whose body the request does not want.

    Raises BadRedirect and every error of the pool.
    """
    deadline = trio.current_time() + request.deadline_s
    cookies: Cookies | None = None
    plain = request  # Without the cookies of the chain.
    for _ in range(REDIRECTS_MAX + 1):
        response = await pool.fetch(request)
        location = response.header(b"location")
        is_final = response.status not in _REDIRECTS or location is None
        if is_final or request.wants_body(response.status):
            return Followed(response, request.target)
        assert location is not None
        target = join(request.target, location)
        if isinstance(target, BadUrl):
            raise BadRedirect("the redirect leads to something that is not a web address")
        cookies = cookies or Cookies()
        cookies.remember(request.target, response)
        # `join` has parsed the address strictly, and the pool resolves and checks it before it
        # connects. So a redirect cannot reach an address that the first URL could not.
        plain = next_request(
            plain, target, response.status, deadline_s=deadline - trio.current_time()
        )
        headers = cookies.add_to(plain.headers, target)
        request = msgspec.structs.replace(plain, headers=headers)
    raise BadRedirect(f"more than {REDIRECTS_MAX} redirects")


def next_request(request: Request, target: Target, status: int, *, deadline_s: float) -> Request:
    # As browsers do: 303 asks for a GET, and 301 and 302 turn a POST into one.
    is_read = request.method in {"GET", "HEAD"}
    keeps_method = is_read or (status != 303 and (status in {307, 308} or request.method != "POST"))
    body, headers = request.body, request.headers
    if not keeps_method:
        body = None
        headers = tuple(pair for pair in headers if pair[0].lower() not in _OF_THE_BODY)
    if target.origin != request.target.origin:
        # Sending the body would disclose it, and dropping it would send another request than the
        # caller's. So the fetch fails.
        if body:
            raise BadRedirect("the redirect would take the request's body to another origin")
        body, headers = None, public_headers(headers, request.target, target)
    return msgspec.structs.replace(
        request,
        method=request.method if keeps_method else "GET",
        target=target,
        headers=headers,
        body=body,
        deadline_s=deadline_s,
    )


def public_headers(headers: Headers, source: Target, target: Target) -> Headers:
    """Returns the headers that another origin may receive.

    Dropped headers do not return if a later redirect leads to the first origin again: the site in
    between chose the URL of that request.
    """
    allowed: list[tuple[str, str]] = []
    for name, value in headers:
        if name.lower() in _PUBLIC:
            allowed.append((name, value))
        elif name.lower() == "referer" and (target.is_tls or not source.is_tls):
            page = parse_url(value)
            if isinstance(page, Target) and (target.is_tls or not page.is_tls):
                # As browsers do: the origin of the page, without path and query.
                allowed.append((name, f"{page.scheme}://{page.authority}/"))
    return tuple(allowed)


def forwardable(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the caller's headers without those that would change the framing of the request."""
    return [
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in _DROPPED and not lower.startswith("proxy-")
    ]
