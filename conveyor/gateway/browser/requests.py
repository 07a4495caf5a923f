"""The requests of a page: what `json_response` reports, and which of them are blocked or changed
(docs/gateway.md, Browsers).

The custom headers of a call are sent only to the origin of its URL: any of them may be a
credential, and a page loads parts of other sites. So they are added to each request by its URL, and
removed again when a redirect leads to another origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from conveyor.domain import limits
from conveyor.domain.submit.target import BadUrl, Target, parse_url
from conveyor.gateway.call import RESOURCES, Call
from conveyor.http_client.pool import forwardable, public_headers

# A page that makes more requests is reported with its first ones.
LOGGED_MAX = 200
# They stay open for as long as the page lives.
_STREAMS = frozenset({"EventSource", "WebSocket", "Ping", "Media", "Prefetch"})
_URL_CHARS_MAX = 8192


class _Request(msgspec.Struct, rename="camel"):
    url: str = ""
    method: str = "GET"
    headers: dict[str, str] = {}


class _Response(msgspec.Struct, rename="camel"):
    url: str = ""
    status: int = 0
    headers: dict[str, str] = {}


class _NetworkEvent(msgspec.Struct, rename="camel"):
    request_id: str = ""
    loader_id: str = ""
    frame_id: str = ""
    type: str = ""
    data_length: int = 0
    canceled: bool = False
    request: _Request = msgspec.field(default_factory=_Request)
    response: _Response = msgspec.field(default_factory=_Response)


class _PausedRequest(msgspec.Struct, rename="camel"):
    request_id: str
    resource_type: str = ""
    request: _Request = msgspec.field(default_factory=_Request)


class MainResponse(msgspec.Struct, frozen=True):
    url: str
    status: int
    headers: tuple[tuple[str, str], ...]


class LoggedRequest(msgspec.Struct):
    """An XHR or a fetch of the page."""

    id: str
    url: str
    method: str
    request_headers: dict[str, str]
    status: int = 0
    headers: dict[str, str] = {}

    def to_json(self, body: str) -> dict[str, Any]:
        return {
            "url": self.url,
            "body": body,
            "status_code": self.status,
            "method": self.method,
            "headers": self.headers,
            "request_headers": self.request_headers,
        }


class RequestLog:
    """Counts the requests under way, and keeps the response of the document.

    A navigation that ends in a download gets a response too, but the page stays what it was: a
    response counts from `commit` on. `is_broken` and `is_too_large` are about the body of the
    document.
    """

    def __init__(self, frame_id: str, *, on_change: Callable[[], None]) -> None:
        self._frame_id = frame_id
        self._on_change = on_change
        self._pending: set[str] = set()
        self._logged: dict[str, LoggedRequest] = {}
        self._documents: dict[str, MainResponse] = {}
        self._document_id = ""
        self._document_bytes = 0
        self.main_response: MainResponse | None = None
        self.is_broken = False
        self.is_too_large = False

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def xhr(self) -> Iterator[LoggedRequest]:
        return (request for request in self._logged.values() if request.status)

    def commit(self, document_id: str) -> None:
        """The page now shows this document. One that no site sent, such as a blob, has no
        response, and keeps that of the page which made it."""
        self._document_id = document_id
        self._document_bytes = 0
        self.main_response = self._documents.get(document_id, self.main_response)
        if self.main_response is not None:
            length = dict(self.main_response.headers).get("content-length", "")
            # Longer numbers are no lengths.
            is_length = length.isascii() and length.isdigit() and len(length) <= 18
            self.is_too_large = is_length and int(length) > limits.BODY_BYTES_MAX
        self._on_change()

    def take(self, method: str, raw: msgspec.Raw) -> None:
        match method:
            case "Network.requestWillBeSent":
                self._begin(msgspec.json.decode(raw, type=_NetworkEvent))
            case "Network.responseReceived":
                self._answer(msgspec.json.decode(raw, type=_NetworkEvent))
            case "Network.loadingFinished" | "Network.loadingFailed":
                event = msgspec.json.decode(raw, type=_NetworkEvent)
                self._pending.discard(event.request_id)
                if event.request_id == self._document_id and method == "Network.loadingFailed":
                    self.is_broken = not event.canceled
                self._on_change()
            case "Network.dataReceived":
                event = msgspec.json.decode(raw, type=_NetworkEvent)
                if event.request_id == self._document_id:
                    self._document_bytes += event.data_length
                    if self._document_bytes > limits.BODY_BYTES_MAX:
                        self.is_too_large = True
                        self._on_change()

    def _begin(self, event: _NetworkEvent) -> None:
        # The end of a worker's own script is an event of the worker, and not of the page.
        if event.type in _STREAMS or event.request.url.startswith(("blob:", "data:")):
            return
        self._pending.add(event.request_id)
        if event.type in {"XHR", "Fetch"} and len(self._logged) < LOGGED_MAX:
            request = event.request
            self._logged[event.request_id] = LoggedRequest(
                event.request_id, request.url[:_URL_CHARS_MAX], request.method, request.headers
            )
        self._on_change()

    def _answer(self, event: _NetworkEvent) -> None:
        response = event.response
        logged = self._logged.get(event.request_id)
        if logged is not None:
            logged.status, logged.headers = response.status, response.headers
        if event.type == "Document" and event.frame_id == self._frame_id:
            headers = tuple((name.lower(), value) for name, value in response.headers.items())
            document = MainResponse(response.url, response.status, headers)
            self._documents[event.request_id] = document
            if self.main_response is None or event.request_id == self._document_id:
                self.main_response = document


class RequestFilter:
    """Decides about the requests that the browser pauses for us."""

    def __init__(self, call: Call) -> None:
        assert call.rendering is not None
        self._target = call.target
        self._blocked = frozenset(RESOURCES[kind] for kind in call.rendering.blocked)
        self._headers = tuple(forwardable(call.headers))

    @property
    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """What the browser must be told. Each paused request costs an exchange of messages, so only
        those are paused about which there is something to decide."""
        commands: list[tuple[str, dict[str, Any]]] = []
        if "WebSocket" in self._blocked:
            commands.append(("Network.setBlockedURLs", {"urls": ["ws://*", "wss://*"]}))
        patterns = [{"urlPattern": "*", "resourceType": kind} for kind in sorted(self._pausable)]
        if self._headers:
            patterns = [{"urlPattern": "*"}]
        if patterns:
            commands.append(("Fetch.enable", {"patterns": patterns}))
        agent = next((value for name, value in self._headers if name.lower() == "user-agent"), None)
        if agent is not None:
            # So that scripts see the same one as the site.
            commands.append(("Emulation.setUserAgentOverride", {"userAgent": agent}))
        return commands

    @property
    def _pausable(self) -> frozenset[str]:
        return self._blocked - {"WebSocket"}

    def decide(self, raw: msgspec.Raw) -> tuple[str, dict[str, Any]]:
        """Returns the command for a paused request."""
        paused = msgspec.json.decode(raw, type=_PausedRequest)
        of_request = {"requestId": paused.request_id}
        if paused.resource_type in self._blocked:
            return "Fetch.failRequest", {**of_request, "errorReason": "BlockedByClient"}
        if not self._headers:
            return "Fetch.continueRequest", of_request
        headers = self._headers_for(paused.request.url, paused.request.headers)
        lines = [{"name": name, "value": value} for name, value in headers.items()]
        return "Fetch.continueRequest", {**of_request, "headers": lines}

    def _headers_for(self, url: str, theirs: Mapping[str, str]) -> dict[str, str]:
        ours = {name.lower() for name, _ in self._headers}
        headers_left = {name: value for name, value in theirs.items() if name.lower() not in ours}
        target = parse_url(url, chars_max=_URL_CHARS_MAX)
        if isinstance(target, BadUrl):
            return headers_left
        return headers_left | dict(self._allowed(target))

    def _allowed(self, target: Target) -> Any:
        if target.origin == self._target.origin:
            return self._headers
        return public_headers(self._headers, self._target, target)
