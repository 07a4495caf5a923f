"""One connected socket, driven straight by Trio's readiness calls.

This is the hot path: `trio.SocketStream` is right but costs several checkpoints per call. A wire
belongs to one task at a time; closing it is immediate and needs no await, so a cancelled fetch
leaves nothing behind.
"""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import suppress

import trio
from trio.lowlevel import notify_closing, wait_readable, wait_writable

from conveyor.http_client.errors import (
    TOO_LATE,
    ConnectFailed,
    ConnectionLost,
    TimedOut,
    TlsFailed,
    judge_connect,
)

RECEIVE_BYTES = 64 * 1024


class TcpStream:
    """`idle_until` is the pool's: when an idle connection is too old to trust."""

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
            raise TimedOut(TOO_LATE) from None

    async def receive(self) -> bytes:
        """What has arrived, at most 64 KiB; empty at the end of the stream."""
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
        """Whether an idle connection is still open and has nothing to say, as it should."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def receive_nowait(self) -> bytes:
        """What has arrived on an idle connection; empty if it is quiet or closed."""
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except OSError:
            return b""

    def has_unread(self) -> bool:
        """Whether the peer sent something into an idle connection. It cannot be used after this."""
        return bool(self.receive_nowait())

    def interrupt(self) -> None:
        """Whoever waits for the peer now waits no longer: TimedOut."""
        notify_closing(self._socket)

    def close(self) -> None:
        self._socket.close()


async def connect(address: str, port: int) -> socket.socket:
    """A connected, non-blocking socket to one checked address. Raises ConnectFailed, and
    OutOfResources where this process is the cause."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        opened = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise judge_connect(error, address, port) or ConnectFailed(reason(error)) from error
    try:
        opened.setblocking(False)
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
    # os.strerror would do, but a raw errno from SO_ERROR has no type of its own.
    return _WORDS.get(type(OSError(error.errno or 0, "")), f"network error {error.errno}")


# TLS over a wire, through memory: one read of the socket takes in all records that are there.
#
# `ssl.SSLSocket` makes two system calls for each record and an exception for each wait;
# `trio.SSLStream` several checkpoints for each call. A stream that ends without TLS's goodbye has
# ended all the same, as many servers never send one.


_RECORD_BYTES = 16 * 1024


class TlsStream:
    """A wire inside TLS; the same promises. `start` comes first."""

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
        """Made anew on every call, at the price of several requests."""
        return self._tls.session

    async def start(self) -> None:
        """Shake hands as the host, by name; the certificate must be for it. Raises TlsFailed."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                except ssl.SSLError:
                    with suppress(ConnectionLost):
                        await self._flush()  # The alert that tells the server why.
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
                rest = rest[self._tls.write(rest) :]
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError as error:
                raise ConnectionLost(_reason(error)) from error
        await self._flush()

    async def receive(self) -> bytes:
        """What has arrived, all records of it; empty at the end of the stream."""
        while not self._is_over:
            if not self._incoming.pending:
                await self._fill()
            pieces = self._decrypted()
            await self._flush()
            if pieces:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return b""

    def is_quiet(self) -> bool:
        return self._is_between_records and self._wire.is_quiet()

    def has_unread(self) -> bool:
        """As of a wire; a session ticket or a goodbye is nothing that was sent to be read."""
        data = self._wire.receive_nowait()
        if not data:
            return False
        self._incoming.write(data)
        try:
            return bool(self._decrypted())
        except ConnectionLost:
            return False

    def interrupt(self) -> None:
        self._wire.interrupt()

    def close(self) -> None:
        self._wire.close()

    def _decrypted(self) -> list[bytes]:
        """Everything that can be read now. OpenSSL takes no more than it needs for a record, so
        nothing of the next one is inside it unless it asks for more.
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
