"""Helper processes: forked before the event loop starts, so they import nothing again.

A helper gets the positions of pages over a socket, fetches and writes them, and sends the answers
back. It ends when the socket closes, which happens even if the first process is killed. It
inherits the lock of the folder, so nobody else can use the folder while it lives.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
import trio

from conveyor.cli.scrape.pages import Answer
from conveyor.cli.scrape.scraper import Scraper
from conveyor.domain.errors import ConveyorError

# A helper gets more pages than it fetches at once, so that it does not wait for the first process.
PREFETCH = 1.5
_LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decode_pages = msgspec.msgpack.Decoder(list[int]).decode
_decode_answers = msgspec.msgpack.Decoder(list[Answer]).decode

Work = Callable[["HelperSide"], Awaitable[None]]


def fork_helper(work: Work) -> Helper:
    """Starts a process that runs `work` until this process closes the connection."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Helper(pid, ours)
    code = 1
    try:
        ours.close()
        # Ctrl-C reaches the whole process group. The first process decides when this one ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trio.run(_run_helper, theirs, work)
        code = 0
    finally:
        # Nothing of the first process may go on in this one, whatever was raised.
        error = sys.exc_info()[1]
        if error is not None and not _is_expected(error):
            traceback.print_exception(error)
        os._exit(code)


def _is_expected(error: BaseException) -> bool:
    """Whether the first process tells this: it takes the pages over and meets the same, as with a
    full disk."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(ConveyorError)[1] is None
    return isinstance(error, ConveyorError)


async def _run_helper(connection: socket.socket, work: Work) -> None:
    await work(HelperSide(_stream(connection)))


def _stream(connection: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))


class Helper:
    """A helper as the first process sees it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection = connection
        self._sent: set[int] = set()
        self._has_room = trio.Event()

    async def run(self, scraper: Scraper, slots: int) -> None:
        """Sends pages and settles answers until there is no more to do, or the helper is gone."""
        stream = _stream(self._connection)
        room = max(1, int(slots * PREFETCH))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed, scraper, stream, room)
            await self._settle_answers(scraper, stream)
            nursery.cancel_scope.cancel()
        lost = list(self._sent)
        self._sent.clear()
        scraper.lose(lost)

    async def _feed(self, scraper: Scraper, stream: trio.SocketStream, room: int) -> None:
        while not scraper.is_over:
            batch: list[int] = []
            while len(self._sent) < room and (index := scraper.take()) is not None:
                self._sent.add(index)
                batch.append(index)
            if batch:
                scraper.wake_next()
                with suppress(trio.BrokenResourceError):
                    await _send(stream, _encode(batch))
            elif len(self._sent) < room:
                await scraper.wait_changed()
            else:
                self._has_room = trio.Event()
                await self._has_room.wait()
        # The helper has nothing more to fetch: it ends at the end of the stream.
        with suppress(trio.BrokenResourceError):
            await stream.send_eof()

    async def _settle_answers(self, scraper: Scraper, stream: trio.SocketStream) -> None:
        async for frame in _frames(stream):
            answers = _decode_answers(frame)
            self._sent.difference_update(answer.index for answer in answers)
            scraper.settle(answers)
            self._has_room.set()

    def stop(self) -> None:
        """Ends the process; called after the event loop. Its pages are written, or in flight."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


class HelperSide:
    """The connection of a helper process to the first one."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._pages: deque[int] = deque()
        self._answers: list[Answer] = []
        self._has_answers = trio.Event()
        self._parked = trio.lowlevel.ParkingLot()

    async def next_page(self) -> int | None:
        """Waits for a page; this process is cancelled when there are no more."""
        while not self._pages:
            await self._parked.park()
        return self._pages.popleft()

    def settle(self, answers: Sequence[Answer]) -> None:
        self._answers.extend(answers)
        self._has_answers.set()

    async def receive(self) -> None:
        """Receives pages until the first process sends no more."""
        async for frame in _frames(self._stream):
            self._pages.extend(_decode_pages(frame))
            self._parked.unpark(count=len(self._pages))

    async def send(self) -> None:
        while True:
            await self._has_answers.wait()
            self._has_answers = trio.Event()
            answers, self._answers = self._answers, []
            await _send(self._stream, _encode(answers))


async def _send(stream: trio.SocketStream, frame: bytes) -> None:
    await stream.send_all(len(frame).to_bytes(_LENGTH_BYTES) + frame)


async def _frames(stream: trio.SocketStream) -> AsyncIterator[bytes]:
    """Yields the frames until the peer is gone."""
    rest = b""
    while True:
        length = int.from_bytes(rest[:_LENGTH_BYTES])
        end = _LENGTH_BYTES + length
        if len(rest) >= _LENGTH_BYTES and len(rest) >= end:
            yield rest[_LENGTH_BYTES:end]
            rest = rest[end:]
            continue
        try:
            piece = await stream.receive_some(256 * 1024)
        except trio.BrokenResourceError:
            return
        if not piece:
            return
        rest += piece
