"""A server on loopback that gives prepared answers in order and records the requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; if `hangs_up`, the connection is closed after these bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hangs_up: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Scripted:
    port: int = 0
    answers: deque[Answer] = field(default_factory=deque)
    requests: list[RecordedRequest] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer_with(self, *answers: Answer) -> None:
        self.answers.extend(answers)


def problem(status: int, code: str, *, retry_after: str | None = None) -> Answer:
    body = {"type": "about:blank", "title": "No", "status": status, "code": code, "detail": "no."}
    headers = {"X-Request-ID": "r-1"} | ({"Retry-After": retry_after} if retry_after else {})
    return Answer(status, msgspec.json.encode(body), headers)


@contextmanager
def scripted_server() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            script.requests.append(RecordedRequest(self.command, self.path, headers, body))
            answer = script.answers.popleft()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) + answer.hangs_up))
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = answer.hangs_up

        do_GET = do_POST = do_DELETE = respond  # noqa: N815 (the names that http.server looks for)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Suppresses the request log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
