"""A local shop that needs JavaScript, and records every request that it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SHOP = """<!doctype html><html><head><title>Shop</title><link rel="stylesheet" href="/shop.css">
</head><body><h1>Products</h1><ul id="list"></ul><button id="more">more</button>
<img src="/logo.png"><input id="name"><input id="agree" type="checkbox">
<select id="colour"><option value="red">red</option><option value="blue">blue</option></select>
<p id="said"></p><script src="/shop.js"></script></body></html>"""
SCRIPT = """
const add = text => {
    const item = document.createElement('li');
    item.className = 'product';
    item.textContent = text;
    document.getElementById('list').append(item);
};
fetch('/api/products').then(response => response.json()).then(names => names.forEach(add));
document.getElementById('more').onclick = () => setTimeout(() => add('lazy thing'), 50);
document.getElementById('name').oninput = event => {
    document.getElementById('said').textContent = 'hello ' + event.target.value;
};
"""
LAZY = """<!doctype html><p>wait</p><div style="height:5000px"></div><p id="end"></p><script>
new IntersectionObserver(entries => {
    if (entries.some(entry => entry.isIntersecting))
        document.getElementById('end').textContent = 'the end was seen';
}).observe(document.getElementById('end'));
setTimeout(() => document.body.insertAdjacentHTML('beforeend', '<b class="late">late</b>'), 400);
</script>"""
FRAME = '<!doctype html><iframe id="inner" src="/"></iframe>'
STORED = """<!doctype html><script>
document.write('<p id="before">' + document.cookie + localStorage.getItem('mark') + '</p>');
document.cookie = 'mark=1'; localStorage.setItem('mark', '1');
</script>"""


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]


def _html(text: str, status: int = 200) -> Answer:
    return status, {"Content-Type": "text/html; charset=utf-8"}, text.encode()


PAGES: dict[str, Answer] = {
    "/": _html(SHOP),
    "/lazy": _html(LAZY),
    "/frame": _html(FRAME),
    "/stored": _html(STORED),
    "/shop.css": (200, {"Content-Type": "text/css"}, b"li { color: red }"),
    "/shop.js": (200, {"Content-Type": "text/javascript"}, SCRIPT.encode()),
    "/logo.png": (200, {"Content-Type": "image/png"}, b""),
    "/api/products": (
        200,
        {"Content-Type": "application/json"},
        json.dumps([f"thing {number}" for number in range(20)]).encode(),
    ),
    "/missing": _html("<h1>nothing here</h1>", 404),
    "/broken": _html("<h1>it broke</h1>", 500),
    "/moved": (302, {"Location": "/"}, b""),
    "/file": (
        200,
        {"Content-Type": "application/zip", "Content-Disposition": "attachment"},
        b"PK the file",
    ),
    "/alert": _html("<p>Open.</p><script>alert('stop'); document.title = 'went on'</script>"),
}


@dataclass
class LocalSite:
    url: str
    requests: list[Request] = field(default_factory=list)
    pages: dict[str, Answer] = field(default_factory=dict)

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def headers_of(self, path: str) -> dict[str, str]:
        return next(request.headers for request in reversed(self.requests) if request.path == path)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Nothing is printed: a browser that is killed leaves its requests."""


@contextmanager
def serve_site(pages: dict[str, Answer] | None = None) -> Iterator[LocalSite]:
    site = LocalSite("", pages={**PAGES, **(pages or {})})
    server = _Server(("127.0.0.1", 0), _handler(site))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(site: LocalSite) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = urlsplit(self.path).path
            headers = {name.lower(): value for name, value in self.headers.items()}
            site.requests.append(Request(self.command, self.path, headers, body))
            if path == "/echo":
                answer: Answer = (200, {"Content-Type": "text/plain"}, body)
            else:
                answer = site.pages.get(path, (404, {}, b""))
            status, headers_sent, content = answer
            self.send_response(status)
            for name, value in headers_sent.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815 (names of the standard library)

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    return Handler
