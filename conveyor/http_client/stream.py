"""One connected socket, plain or with TLS, on Trio's readiness calls; and the dialer that opens it.

This is the hot path: `trio.SocketStream` is correct but costs several checkpoints per call. A
stream belongs to one task at a time. Closing it is immediate and needs no await, so that a
cancelled fetch leaves no open socket.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio
from trio.lowlevel import notify_closing, wait_readable, wait_writable

from conveyor.domain.submit.target import Target
from conveyor.http_client.errors import (
    TOO_LATE,
    ConnectFailed,
    ConnectionLost,
    ConnectTimedOut,
    TimedOut,
    TlsFailed,
    check_descriptors,
    judge_connect,
)
from conveyor.http_client.resolver import Resolver

# The most bytes of one read. Larger reads allocate more memory per connection; smaller ones need
# more system calls per page.
RECEIVE_BYTES = 64 * 1024


class TcpStream:
    """A plain connection. The pool sets `idle_until`, after which it no longer reuses it."""

    __slots__ = ("_socket", "idle_until")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.idle_until = 0.0

    async def send(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    await wait_writable(self._socket)
        except OSError as error:
            raise ConnectionLost(reason(error)) from error
        except trio.ClosedResourceError:
            # `interrupt` was called: the deadline timer ended this wait.
            raise TimedOut(TOO_LATE) from None

    async def receive(self) -> bytes:
        """Returns the bytes that have arrived, at most 64 KiB; empty at the end of the stream."""
        try:
            while True:
                await wait_readable(self._socket)
                try:
                    return self._socket.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    continue
        except OSError as error:
            raise ConnectionLost(reason(error)) from error
        except trio.ClosedResourceError:
            raise TimedOut(TOO_LATE) from None

    def is_quiet(self) -> bool:
        """Whether an idle connection is open and has no unread bytes, as it must be for reuse."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def receive_nowait(self) -> bytes:
        """Returns the bytes on an idle connection; empty if there are none or it is closed."""
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except OSError:
            return b""

    def has_unread(self) -> bool:
        """Whether the peer sent bytes into an idle connection. It consumes them: close it after."""
        return bool(self.receive_nowait())

    def interrupt(self) -> None:
        """Makes the task that waits for the peer raise TimedOut. The socket stays open."""
        notify_closing(self._socket)

    def close(self) -> None:
        self._socket.close()


async def connect(address: str, port: int) -> socket.socket:
    """Returns a connected, non-blocking socket to one checked address.

    Raises ConnectFailed, and OutOfResources if this process is the cause.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        opened = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise judge_connect(error, address, port) or ConnectFailed(reason(error)) from error
    try:
        opened.setblocking(False)
        # A request is one write: waiting for more data would only delay it.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            opened.connect((address, port))
        except BlockingIOError as error:
            if error.errno != errno.EINPROGRESS:
                raise
            await wait_writable(opened)
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "")
    except OSError as error:
        opened.close()
        raise judge_connect(error, address, port) or ConnectFailed(reason(error)) from error
    except BaseException:
        opened.close()
        raise
    return opened


_WORDS = {
    ConnectionRefusedError: "connection refused",
    ConnectionResetError: "connection reset",
    BrokenPipeError: "connection closed by the peer",
    TimeoutError: "connection timed out",
}


def reason(error: OSError) -> str:
    words = _WORDS.get(type(error))
    if words is not None:
        return words
    # An errno from SO_ERROR was raised as OSError(code): a new OSError maps it to its subclass.
    return _WORDS.get(type(OSError(error.errno or 0, "")), f"network error {error.errno}")


# TLS runs through memory buffers: one read of the socket takes all records that have arrived.
#
# `ssl.SSLSocket` makes two system calls for each record and raises an exception for each wait.
# `trio.SSLStream` costs several checkpoints for each call. A stream that ends without close_notify
# counts as ended, because many servers never send it. Content-Length and chunks detect a cut body;
# a body that ends with the connection has no such check.


# Data is encrypted in steps of this size, so that a large body is not in memory twice.
_SEND_BYTES = 256 * 1024
# The largest TLS record.
_RECORD_BYTES = 16 * 1024


class TlsStream:
    """A TLS connection with the interface of TcpStream. The owner calls `start` first."""

    __slots__ = (
        "_incoming",
        "_is_between_records",
        "_is_over",
        "_outgoing",
        "_tls",
        "_wire",
        "idle_until",
    )

    def __init__(
        self, wire: TcpStream, context: ssl.SSLContext, host: str, session: ssl.SSLSession | None
    ) -> None:
        self._wire = wire
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=host, session=session
        )
        self._is_between_records = True
        self._is_over = False
        self.idle_until = 0.0

    @property
    def session(self) -> ssl.SSLSession | None:
        """OpenSSL builds a new session on every call, which costs as much as several requests."""
        return self._tls.session

    async def start(self) -> None:
        """Does the handshake. The certificate must be valid for the host. Raises TlsFailed."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                except ssl.SSLError:
                    with suppress(ConnectionLost):
                        await self._flush()  # Send the alert, which gives the server the reason.
                    raise
                else:
                    return await self._flush()
        except ssl.SSLCertVerificationError as error:
            detail = f"the certificate is not trusted: {error.verify_message}"
            raise TlsFailed(detail, is_untrusted=True) from error
        except ssl.SSLError as error:
            raise TlsFailed(f"the TLS handshake failed: {_reason(error)}") from error
        except ConnectionLost as error:
            raise TlsFailed(f"the TLS handshake failed: {error.detail}") from error

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._tls.write(rest[:_SEND_BYTES]) :]
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError as error:
                raise ConnectionLost(_reason(error)) from error
            else:
                await self._flush()

    async def receive(self) -> bytes:
        """Returns the content of all records that have arrived; empty at the end of the stream."""
        while not self._is_over:
            if not self._incoming.pending:
                await self._fill()
            pieces = self._decrypt()
            await self._flush()
            if pieces:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return b""

    def is_quiet(self) -> bool:
        return self._is_between_records and self._wire.is_quiet()

    def has_unread(self) -> bool:
        """As TcpStream.has_unread. A session ticket or a close_notify carries no data."""
        data = self._wire.receive_nowait()
        if not data:
            return False
        self._incoming.write(data)
        try:
            return bool(self._decrypt())
        except ConnectionLost:
            return False

    def interrupt(self) -> None:
        self._wire.interrupt()

    def close(self) -> None:
        self._wire.close()

    def _decrypt(self) -> list[bytes]:
        """Returns all data that can be decrypted now.

        OpenSSL reads no more input than one record needs. If it does not ask for more, it holds no
        part of the next record.
        """
        pieces: list[bytes] = []
        self._is_between_records = False
        try:
            while self._incoming.pending:
                piece = self._tls.read(_RECORD_BYTES)
                if not piece:
                    self._is_over = True
                    return pieces
                pieces.append(piece)
        except ssl.SSLWantReadError:
            return pieces
        except ssl.SSLError as error:
            raise ConnectionLost(_reason(error)) from error
        self._is_between_records = True
        return pieces

    async def _fill(self) -> None:
        data = await self._wire.receive()
        if data:
            self._incoming.write(data)
        else:
            self._is_over = True
            self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._wire.send(self._outgoing.read())


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "protocol error").replace("_", " ").lower()


Connect = Callable[[str, int], Awaitable[socket.socket]]
# A caller and an origin.
SessionKey = tuple[str, tuple[str, str, int]]

# Addresses to try for one connection. Each attempt can take the whole connect timeout, so a larger
# value lets a dead host use up the deadline of the fetch; with 1, one dead address loses the host.
ATTEMPTS_MAX = 4
# Bounds the memory. When it is full, the oldest session is dropped and costs a full handshake.
SESSIONS_MAX = 1024


def default_tls() -> ssl.SSLContext:
    """A context that verifies certificates and host names and offers HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Owns the TLS sessions to resume. It does not know the pool.

    A session is resumed only for the caller that it was made for. With a shared session, a site
    would learn that two callers share a machine, and could treat one as the other.
    """

    def __init__(
        self,
        resolver: Resolver,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        connect: Connect = connect,
    ) -> None:
        self._resolver = resolver
        self._connect = connect
        self._tls = tls
        self._timeout_s = connect_timeout_s
        self._sessions: dict[SessionKey, ssl.SSLSession] = {}

    async def dial(
        self, target: Target, partition: str, timeout_s: float | None = None
    ) -> TcpStream | TlsStream:
        addresses = await self._resolver.resolve(target, partition)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        failure: ConnectFailed | TimedOut | None = None
        for address in addresses[:ATTEMPTS_MAX]:
            try:
                with trio.fail_after(timeout_s):
                    return await self._open(target, partition, address)
            except trio.TooSlowError:
                failure = ConnectTimedOut("the connection took too long")
            except ConnectFailed as error:
                failure = error
        assert failure is not None
        raise failure

    def remember(self, target: Target, partition: str, stream: TcpStream | TlsStream) -> None:
        """Stores the TLS session of a connection that has delivered a response.

        In TLS 1.3 the server sends the session ticket after the handshake, so it is not available
        earlier.
        """
        session = stream.session if isinstance(stream, TlsStream) else None
        if session is None:
            return
        key = (partition, target.origin)
        # Remove and insert again, so that the order of the dict is the order of use.
        self._sessions.pop(key, None)
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[key] = session

    async def _open(self, target: Target, partition: str, address: str) -> TcpStream | TlsStream:
        stream = TcpStream(await self._connect(address, target.port))
        if not target.is_tls:
            return stream
        try:
            session = self._sessions.get((partition, target.origin))
            inside = TlsStream(stream, self._context(), target.host, session)
            await inside.start()
        except TlsFailed as error:
            stream.close()
            if error.is_untrusted:
                check_descriptors()  # OpenSSL also reports this when it cannot open a file.
            raise
        except BaseException:
            stream.close()
            raise
        return inside

    def _context(self) -> ssl.SSLContext:
        """Loads the certificates of the authorities for the first https target: it takes 35 ms.

        Without a free descriptor they cannot be read, and this process would trust no certificate
        until it ends. The check comes first for this reason.
        """
        if self._tls is None:
            check_descriptors()
            self._tls = default_tls()
        return self._tls
