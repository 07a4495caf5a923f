"""DevTools: calls and events of the Chrome DevTools Protocol over two pipes
(docs/gateway.md, Browsers).

The browser reads commands from one pipe and writes answers and events into the other, each as JSON
that ends with a null byte. Pipes instead of a WebSocket have three advantages: no port is open that
a page or another user could reach, no client library is needed, and the browser ends by itself
when its pipe closes, even if this process was killed (docs/decisions/0031-chromium-over-pipes.md
has the measurement).

Events go to a callback at once, in the order in which they arrived. A callback changes state and
sets Trio events; it never waits, so that a page that produces many events delays no other page.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import msgspec
import trio

from conveyor.gateway.errors import CallRefused

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
# A page, a screenshot or a PDF is one message. A larger one could only come from a page that wants
# to fill our memory.
MESSAGE_BYTES_MAX = 160 * 1024 * 1024
# The event of every session when the browser has ended: the protocol's own for a session that was
# detached.
GONE = "Inspector.detached"
# Each call waits for its answer, so this many calls would have to be under way at the same time.
_QUEUED_MAX = 1024


class BrowserGone(Exception):
    """The browser has ended or its pipe is closed. Every page in it is lost."""


class _Refusal(msgspec.Struct):
    message: str = ""


class _Message(msgspec.Struct, rename="camel"):
    """An answer, which has an id, or an event, which has a method."""

    id: int = 0
    method: str = ""
    params: msgspec.Raw = msgspec.Raw(b"{}")
    result: msgspec.Raw = msgspec.Raw(b"{}")
    error: _Refusal | None = None
    session_id: str = ""


class _Call:
    __slots__ = ("answer", "done", "session_id")

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.done = trio.Event()
        self.answer: _Message | None = None


def _read_message(data: bytes) -> _Message:
    """Reads a message. The text of a page may contain halves of surrogate pairs, which JSON of
    browsers has and msgspec refuses; they become question marks, as in the HTML of such a page."""
    try:
        return msgspec.json.decode(data, type=_Message)
    except msgspec.DecodeError:
        # Slower, and holds several copies, so only where it must be.
        repaired = json.dumps(json.loads(data), ensure_ascii=False).encode(errors="replace")
        return msgspec.json.decode(repaired, type=_Message)


OnEvent = Callable[[str, msgspec.Raw], None]


class DevTools:
    """`run` serves the connection until it ends; then every call raises BrowserGone."""

    def __init__(self, commands: trio.abc.SendStream, answers: trio.abc.ReceiveStream) -> None:
        self._commands = commands
        self._answers = answers
        self._queue, self._queued = trio.open_memory_channel[bytes](_QUEUED_MAX)
        self._calls: dict[int, _Call] = {}
        self._listeners: dict[str, OnEvent] = {}
        self._last_id = 0
        self._gone = trio.Event()

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        """Waits for the end of the connection, and raises BrowserGone."""
        await self._gone.wait()
        raise BrowserGone

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read()
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The browser ended.
        except* (ValueError, RecursionError) as errors:
            # What cannot be read costs this browser, and must not cost the others.
            log.warning("browser sent an invalid message", extra={"cause": repr(errors)[:200]})
        finally:
            self._gone.set()
            for call in self._calls.values():
                call.done.set()
            for on_event in list(self._listeners.values()):
                on_event(GONE, msgspec.Raw(b"{}"))

    def listen(self, session_id: str, on_event: OnEvent) -> None:
        self._listeners[session_id] = on_event

    def forget(self, session_id: str) -> None:
        """Ends a session: its events are dropped, and its calls raise BrowserGone."""
        self._listeners.pop(session_id, None)
        for call in self._calls.values():
            if call.session_id == session_id:
                call.done.set()

    async def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        session_id: str = "",
        timeout_s: float = inf,
    ) -> dict[str, Any]:
        """Returns the result. Raises CallRefused, BrowserGone and trio.TooSlowError."""
        result = await self.call_raw(method, params, session_id=session_id, timeout_s=timeout_s)
        decoded: dict[str, Any] = msgspec.json.decode(result)
        return decoded

    async def call_raw(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        session_id: str = "",
        timeout_s: float = inf,
    ) -> msgspec.Raw:
        if self.is_gone:
            raise BrowserGone
        self._last_id = call_id = self._last_id + 1
        call = self._calls[call_id] = _Call(session_id)
        command: dict[str, Any] = {"id": call_id, "method": method, "params": params or {}}
        if session_id:
            command["sessionId"] = session_id
        try:
            with trio.fail_after(timeout_s):
                await self._queue.send(msgspec.json.encode(command) + b"\0")
                await call.done.wait()
        finally:
            del self._calls[call_id]
        if call.answer is None:
            raise BrowserGone
        if call.answer.error is not None:
            raise CallRefused(method, call.answer.error.message)
        return call.answer.result

    def post(self, method: str, params: Mapping[str, Any], *, session_id: str) -> bool:
        """Sends a command whose answer nobody needs. Returns False if too many are queued."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": params, "sessionId": session_id}
        try:
            self._queue.send_nowait(msgspec.json.encode(command) + b"\0")
        except (trio.WouldBlock, trio.BrokenResourceError):
            return False
        return True

    async def _write(self) -> None:
        # One task writes: a cancelled call must not leave half a command in the pipe.
        async for command in self._queued:
            await self._commands.send_all(command)

    async def _read(self) -> None:
        buffer = bytearray()
        searched = 0
        while data := await self._answers.receive_some(READ_BYTES):
            buffer += data
            while (end := buffer.find(b"\0", searched)) >= 0:
                self._take(bytes(buffer[:end]))
                del buffer[: end + 1]
                searched = 0
            searched = len(buffer)
            if searched > MESSAGE_BYTES_MAX:
                return

    def _take(self, data: bytes) -> None:
        message = _read_message(data)
        if message.id:
            call = self._calls.get(message.id)
            if call is not None:
                call.answer = message
                call.done.set()
            return
        listener = self._listeners.get(message.session_id)
        if listener is not None:
            listener(message.method, message.params)
