"""A local gateway that answers for invented sites with pages, errors, prices and delays."""

from __future__ import annotations

import http.server
import json
import random
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

PRICE = "0.00028"
_PAGE = (
    "<html><head><title>{title}</title><style>body{{font-family:sans-serif;margin:2em}}"
    ".price{{font-size:2em;color:#0b5cad}}</style></head><body><h1>{title}</h1>"
    '<p class="price">{price} EUR</p><p>{text}</p></body></html>'
)


@dataclass(frozen=True, slots=True)
class Site:
    """How a host answers: after how many seconds, and which share of its pages with an error."""

    least_s: float = 0.05
    most_s: float = 0.3
    error: tuple[int, str] = (200, "")
    error_share: float = 0.0


SITES = {
    "shop.example": Site(0.1, 0.5, (429, "RESP003"), 0.06),
    "slow.example": Site(2.0, 9.0, (504, "CTX0002"), 0.2),
    "news.example": Site(),
    "blog.example": Site(0.05, 0.4, (422, "RESP001"), 0.03),
    "gone.example": Site(error=(404, "RESP002"), error_share=1.0),
    "busy.example": Site(error=(429, "RESP003"), error_share=1.0),
    "down.example": Site(error=(500, "RESP007"), error_share=1.0),
    "stuck.example": Site(60.0, 60.0),
}


class _Gateway(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        url = urlsplit(query["url"])
        site = SITES.get(url.hostname or "", Site())
        # The first request for a page always has the same outcome, and a repeated one may have
        # another.
        chance = random.Random(query["url"])
        time.sleep(chance.uniform(site.least_s, site.most_s))
        if query.get("apikey", "").startswith("broke"):
            self._refuse(402, "AUTH004")
        elif site.error_share == 1.0 or random.random() < site.error_share:
            self._refuse(*site.error)
        else:
            words = " ".join(chance.choice(("garden", "chair", "lamp", "desk")) for _ in range(900))
            title = url.path.strip("/").replace("/", " ").title()
            self._send(200, _PAGE.format(title=title, price=chance.randint(9, 400), text=words))

    def do_POST(self) -> None:
        """A webhook receiver that always fails."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(204 if self.path.startswith("/works") else 500, "")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, json.dumps({"code": code}), kind="application/json")

    def _send(self, status: int, text: str, kind: str = "text/html; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 200:
            self.send_header("X-Request-Cost", PRICE)
            self.send_header("X-Request-Credits", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has closed its connection, as at a stop, is no error."""


@contextmanager
def a_gateway() -> Iterator[str]:
    """Yields the address of the gateway; its endpoint is `/v1/`."""
    server = _Server(("127.0.0.1", 0), _Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
