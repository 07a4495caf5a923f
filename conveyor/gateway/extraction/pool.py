"""ExtractionPool: a bounded number of processes that extract (docs/content.md, Extraction).

A page is written to a process that has no other, and its document is read. A process that does not
answer in time, or whose call is cancelled, is killed; the next page gets a new one. Nothing of a
page is ever parsed in this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import msgspec
import trio

from conveyor.gateway.extraction.document import Document, NotExtracted, Source
from conveyor.gateway.extraction.worker import Answer

# Processor time for one page.
CPU_S = 10.0
# A process is replaced after so many pages, or when it has used so much memory.
PAGES_MAX = 2000
RSS_BYTES_MAX = 400 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_COMMAND = (sys.executable, "-P", "-m", "conveyor.gateway.extraction.worker")
_PACKAGES = ("cssselect", "extruct", "html_text", "lxml", "markdownify")


class ExtractionTimedOut(NotExtracted):
    """The call has no time left, which says nothing about the page."""


def is_installed() -> bool:
    """Whether the packages of the extra `gateway` are installed."""
    return all(find_spec(name) is not None for name in _PACKAGES)


class _Process:
    """A running process with its pipes."""

    def __init__(self, cpu_s: float) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - the command is a constant
            (*_COMMAND, str(cpu_s)),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Without the environment of this process, which may contain secrets.
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with self._popen.stdin as stdin, self._popen.stdout as stdout:
            self._to = trio.lowlevel.FdStream(os.dup(stdin.fileno()))
            self._from = trio.lowlevel.FdStream(os.dup(stdout.fileno()))
        self.page_count = 0

    async def exchange(self, message: bytes) -> Answer | None:
        """Returns None if the process has ended instead of answering."""
        self.page_count += 1
        try:
            await self._to.send_all(len(message).to_bytes(4) + message)
            head = await self._exactly(4)
            body = None if head is None else await self._exactly(int.from_bytes(head))
        except trio.BrokenResourceError:
            return None
        return None if body is None else msgspec.msgpack.decode(body, type=Answer)

    async def _exactly(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            piece = await self._from.receive_some(min(count - len(data), _READ_BYTES))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def end(self) -> int:
        """Kills the process and returns how it ended. A killed process is gone within
        milliseconds."""
        self._popen.kill()
        return self._popen.wait()


class ExtractionPool:
    """Starts a process when a page first needs one, and keeps it for the next."""

    def __init__(self, process_count: int, *, cpu_s: float = CPU_S) -> None:
        self._limiter = trio.CapacityLimiter(process_count)
        self._cpu_s = cpu_s
        self._idle: list[_Process] = []

    async def extract(self, source: Source, *, deadline_s: float) -> Document:
        """Raises NotExtracted."""
        message = msgspec.msgpack.encode(source)
        with trio.move_on_after(deadline_s):
            async with self._limiter:
                return await self._extract(message)
        raise ExtractionTimedOut("timeout", "no time was left to extract from the page")

    async def _extract(self, message: bytes) -> Document:
        process = self._idle.pop() if self._idle else _Process(self._cpu_s)
        answer = None
        try:
            answer = await process.exchange(message)
        finally:
            if answer is None or _is_worn(process, answer):
                status = process.end()
            else:
                status = 0
                self._idle.append(process)
        if answer is None:
            if status == -signal.SIGPROF:
                raise NotExtracted(
                    "too_large", f"the page took more than {self._cpu_s:g} s to convert"
                )
            raise NotExtracted("not_extracted", "the page cannot be converted")
        if answer.document is None:
            raise NotExtracted(answer.code, answer.detail)
        return answer.document

    def close(self) -> None:
        """No extraction may be running."""
        while self._idle:
            self._idle.pop().end()


def _is_worn(process: _Process, answer: Answer) -> bool:
    return process.page_count >= PAGES_MAX or answer.rss_bytes > RSS_BYTES_MAX
