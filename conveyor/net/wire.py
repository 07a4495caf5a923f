"""One connected socket, driven straight by Trio's readiness calls.

This is the hot path: `trio.SocketStream` is right but costs several checkpoints per call. A wire
belongs to one task at a time; closing it is immediate and needs no await, so a cancelled fetch
leaves nothing behind.
"""

from __future__ import annotations

import errno
import socket

import trio
from trio.lowlevel import notify_closing, wait_readable, wait_writable

from conveyor.net.errors import TOO_LATE, ConnectFailed, ConnectionLost, TimedOut
from conveyor.net.resources import judge_connect

RECEIVE_BYTES = 64 * 1024


class Wire:
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
