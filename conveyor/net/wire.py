"""One connected socket, plain or TLS, driven straight by Trio's readiness calls.

This is the hot path: `trio.SocketStream` and `trio.SSLStream` are right but cost several
checkpoints per call. A wire belongs to one task at a time; closing it is immediate and needs no
await, so a cancelled fetch leaves nothing behind.
"""

from __future__ import annotations

import socket
import ssl

import trio
from trio.lowlevel import wait_readable, wait_writable

from conveyor.net.errors import ConnectFailed, ConnectionLost, TlsFailed

RECEIVE_BYTES = 64 * 1024
_READS_PER_CHECKPOINT = 16


class Wire:
    """`idle_until` is the pool's: when an idle connection is too old to trust."""

    __slots__ = ("_is_tls", "_reads", "_socket", "idle_until")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._reads = 0
        self.idle_until = 0.0

    @property
    def session(self) -> ssl.SSLSession | None:
        return self._socket.session if isinstance(self._socket, ssl.SSLSocket) else None

    async def send(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while rest:
            try:
                sent = self._socket.send(rest)
            except (BlockingIOError, ssl.SSLWantWriteError):
                await wait_writable(self._socket)
            except ssl.SSLWantReadError:
                await wait_readable(self._socket)
            except OSError as error:
                raise ConnectionLost(_reason(error)) from error
            else:
                rest = memoryview(rest)[sent:] if sent < len(rest) else b""

    async def receive(self) -> bytes:
        """What has arrived, at most 64 KiB; empty at the end of the stream."""
        try:
            if self._is_tls:
                return await self._receive_tls()
            while True:
                await wait_readable(self._socket)
                try:
                    return self._socket.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    continue
        except OSError as error:
            raise ConnectionLost(_reason(error)) from error

    async def _receive_tls(self) -> bytes:
        # A record may lie decrypted inside OpenSSL while the socket itself is quiet.
        self._reads += 1
        if self._reads % _READS_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()
        while True:
            try:
                return self._socket.recv(RECEIVE_BYTES)
            except ssl.SSLWantReadError:
                await wait_readable(self._socket)
            except ssl.SSLWantWriteError:
                await wait_writable(self._socket)

    def is_quiet(self) -> bool:
        """Whether an idle connection is still open and has nothing to say, as it should."""
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._socket.close()


async def connect(address: str, port: int) -> socket.socket:
    """A connected, non-blocking socket to one checked address. Raises ConnectFailed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        opened = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectFailed(_reason(error)) from error
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            opened.connect((address, port))
        except BlockingIOError:
            await wait_writable(opened)
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "")
    except OSError as error:
        opened.close()
        raise ConnectFailed(_reason(error)) from error
    except BaseException:
        opened.close()
        raise
    return opened


async def start_tls(
    connected: socket.socket, context: ssl.SSLContext, host: str, session: ssl.SSLSession | None
) -> socket.socket:
    """Shake hands as `host`, by name; the certificate must be for it. Raises TlsFailed."""
    wrapped = connected
    try:
        wrapped = context.wrap_socket(
            connected, server_hostname=host, do_handshake_on_connect=False, session=session
        )
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                await wait_readable(wrapped)
            except ssl.SSLWantWriteError:
                await wait_writable(wrapped)
    except ssl.SSLCertVerificationError as error:
        wrapped.close()
        detail = f"the certificate is not trusted: {error.verify_message}"
        raise TlsFailed(detail, is_untrusted=True) from error
    except OSError as error:
        wrapped.close()
        raise TlsFailed(f"the TLS handshake failed: {_reason(error)}") from error
    except BaseException:
        wrapped.close()
        raise


_WORDS = {
    ConnectionRefusedError: "connection refused",
    ConnectionResetError: "connection reset",
    BrokenPipeError: "connection closed by the peer",
    TimeoutError: "connection timed out",
}


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "protocol error").replace("_", " ").lower()
    words = _WORDS.get(type(error))
    if words is not None:
        return words
    # os.strerror would do, but a raw errno from SO_ERROR has no type of its own.
    return _WORDS.get(type(OSError(error.errno or 0, "")), f"network error {error.errno}")
