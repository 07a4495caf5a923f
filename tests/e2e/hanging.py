"""A site that accepts every connection, reads the requests and never answers."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class HangingSite:
    """`open_count` counts open connections; `requested_paths` are all requests so far."""

    port: int
    open_count: int = 0
    requested_paths: list[str] = field(default_factory=list)

    def tasks(self, count: int) -> list[dict[str, str]]:
        return [{"url": f"http://127.0.0.1:{self.port}/{number}"} for number in range(count)]


@contextmanager
def a_hanging_site() -> Iterator[HangingSite]:
    with socket.socket() as listening, selectors.DefaultSelector() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        site = HangingSite(listening.getsockname()[1])
        waiting.register(listening, selectors.EVENT_READ)
        over = threading.Event()
        thread = threading.Thread(target=_serve, args=(site, listening, waiting, over))
        thread.start()
        try:
            yield site
        finally:
            over.set()
            thread.join()
            for key in list(waiting.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()


def _serve(
    site: HangingSite,
    listening: socket.socket,
    waiting: selectors.BaseSelector,
    over: threading.Event,
) -> None:
    while not over.is_set():
        for key, _ in waiting.select(timeout=0.05):
            if key.fileobj is listening:
                connection, _ = listening.accept()
                waiting.register(connection, selectors.EVENT_READ)
                site.open_count += 1
                continue
            assert isinstance(key.fileobj, socket.socket)
            piece = b""
            with suppress(OSError):  # A killed process resets its connections.
                piece = key.fileobj.recv(65_536)
            if piece:
                site.requested_paths.append(piece.split(b" ")[1].decode())
            else:
                waiting.unregister(key.fileobj)
                key.fileobj.close()
                site.open_count -= 1
