"""A site whose response time the test sets; it counts requests, and how many are open at the same
time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Pages:
    port: int = 0
    think_s: float = 0.05
    request_counts: Counter[int] = field(default_factory=Counter)
    inflight_count: int = 0
    inflight_max: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Event = field(default_factory=threading.Event)

    def tasks(self, count: int, start: int = 0) -> list[dict[str, str]]:
        numbers = range(start, start + count)
        return [{"url": f"http://127.0.0.1:{self.port}/{number}"} for number in numbers]

    def begin(self, number: int) -> None:
        with self.lock:
            self.request_counts[number] += 1
            self.inflight_count += 1
            self.inflight_max = max(self.inflight_max, self.inflight_count)

    def end(self) -> None:
        with self.lock:
            self.inflight_count -= 1


@contextmanager
def some_pages(think_s: float = 0.05) -> Iterator[Pages]:
    pages = Pages(think_s=think_s)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = int(self.path[1:])
            pages.begin(number)
            pages.ending.wait(pages.think_s)
            pages.end()
            body = f"<h1>Page {number}</h1>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                return  # The client was killed or closed the connection.

    class Server(ThreadingHTTPServer):
        daemon_threads = False
        request_queue_size = 512

    with Server(("127.0.0.1", 0), Handler) as server:
        pages.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield pages
        finally:
            pages.ending.set()
            server.shutdown()
            thread.join()
