"""The process that extracts: reads pages from its standard input and writes documents to its output
(docs/content.md, Extraction).

A message is its length in four bytes and msgpack. A page may make a process compute for ever, use
all memory or crash it, so the process limits itself: the kernel ends it after the seconds of
computing for one page that its argument states, and refuses memory above MEMORY_BYTES_MAX.
Processor time, not wall time: a busy machine must not fail a page. The process ends when its input
does, so it never outlives its parent.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from conveyor.gateway.extraction.document import Document, NotExtracted, Source, make_document

# Of address space. The packages take 300 MB of it, most of which is never touched.
MEMORY_BYTES_MAX = 1536 * 1024 * 1024
# Converters call themselves for each level of a page.
_RECURSION_MAX = 20_000


class Answer(msgspec.Struct, frozen=True):
    """A document, or why there is none. `rss_bytes` is the memory that the process uses."""

    document: Document | None = None
    code: str = ""
    detail: str = ""
    rss_bytes: int = 0


def main(cpu_s: float) -> None:
    _limit_resources()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (message := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = msgspec.msgpack.encode(_answer(message))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(len(answer).to_bytes(4) + answer)
        sink.flush()


def _limit_resources() -> None:
    # Interrupts of the terminal go to the parent, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setrecursionlimit(_RECURSION_MAX)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    return source.read(int.from_bytes(head))


def _answer(message: bytes) -> Answer:
    try:
        document = make_document(msgspec.msgpack.decode(message, type=Source))
        return Answer(document, rss_bytes=_rss_bytes())
    except NotExtracted as failure:
        return Answer(code=failure.code, detail=failure.detail, rss_bytes=_rss_bytes())
    except (MemoryError, RecursionError):
        return Answer(code="too_large", detail="the page is too large", rss_bytes=_rss_bytes())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The packages raise these for pages that they do not expect.
        detail = f"the page cannot be converted ({type(error).__name__})"
        return Answer(code="not_extracted", detail=detail, rss_bytes=_rss_bytes())


def _rss_bytes() -> int:
    if sys.platform == "linux":
        # Not `ru_maxrss`: a process inherits that of the one that started it.
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


if __name__ == "__main__":
    main(float(sys.argv[1]))
