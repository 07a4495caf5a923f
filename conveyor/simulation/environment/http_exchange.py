"""One HTTP request and its response as ASGI events, without a socket (docs/api.md, Conventions)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import trio

HOST = "api.example"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """`status` is None until the response begins. `is_whole` is True once it was sent
    completely."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    status: int | None = None
    media_type: str = ""
    answer: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    is_over: trio.Event = field(default_factory=trio.Event)
    hung_up: trio.Event = field(default_factory=trio.Event)
    _has_asked: bool = False

    @property
    def scope(self) -> dict[str, Any]:
        path, _, query = self.path.partition("?")
        sent = {"host": HOST, **self.headers}
        if self.body or self.method in {"POST", "PUT"}:
            sent["content-length"] = str(len(self.body))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "https",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": ("192.0.2.7", 40000),
            "server": (HOST, 443),
            "extensions": {},
        }

    async def receive(self) -> dict[str, Any]:
        if not self._has_asked:
            self._has_asked = True
            await trio.lowlevel.checkpoint()
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Mapping[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if event["type"] == "http.response.start":
            self.status = event["status"]
            self.media_type = _media_type(event["headers"])
        elif event["type"] == "http.response.body":
            self.answer += event.get("body", b"")
            self.is_whole = not event.get("more_body", False)


def _media_type(headers: Iterable[tuple[bytes, bytes]]) -> str:
    types = (value.decode() for name, value in headers if name.lower() == b"content-type")
    return next(types, "").partition(";")[0]
