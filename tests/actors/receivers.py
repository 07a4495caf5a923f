"""Webhook receivers in virtual time: real HTTP requests over socket pairs, without ports or
threads."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.http_client.errors import ConnectFailed
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls
from conveyor.ports.clock import Clock

TLS = default_tls()


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as it arrived."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event_id(self) -> str:
        return self.headers["x-zenrows-event-id"]


@dataclass(slots=True)
class Internet:
    """Every host name leads to these receivers. The receiver at a path may be down, slow or
    working."""

    clock: Clock
    nursery: trio.Nursery
    up_at: dict[str, float] = field(default_factory=dict)
    takes_s: dict[str, float] = field(default_factory=dict)
    requests: list[ReceivedRequest] = field(default_factory=list)
    accepted: list[ReceivedRequest] = field(default_factory=list)
    is_up: bool = True

    def notifier(self) -> WebhookNotifier:
        pool = HttpPool(
            TargetPolicy(allow_private=True), lookup=_anywhere, tls=TLS, connect=self._connect
        )
        return WebhookNotifier(pool, now=self.clock.now)

    async def _connect(self, address: str, port: int) -> socket.socket:
        await trio.lowlevel.checkpoint()
        if not self.is_up:
            raise ConnectFailed("connection refused")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.nursery.start_soon(
            self._answer, trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        )
        return ours

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            request = await _read(stream)
            if request is None:
                return
            received = _parse(request, self.clock.now())
            self.requests.append(received)
            await trio.sleep(self.takes_s.get(received.path, 0.05))
            status = "204 Fine"
            if self.clock.now() < self.up_at.get(received.path, 0.0):
                status = "503 Down"
            else:
                self.accepted.append(received)
            answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            try:
                await stream.send_all(answer.encode())
            except trio.BrokenResourceError:
                self.accepted.remove(received)


async def _anywhere(_host: str) -> Sequence[str]:
    return ["127.0.0.1"]


async def _read(stream: trio.SocketStream) -> bytes | None:
    request = b""
    while not _is_whole(request):
        piece = await stream.receive_some()
        if not piece:
            return None
        request += piece
    return request


def _is_whole(request: bytes) -> bool:
    head, separator, body = request.partition(b"\r\n\r\n")
    return bool(separator) and len(body) >= int(
        head.lower().split(b"content-length: ")[1].split()[0]
    )


def _parse(request: bytes, now: float) -> ReceivedRequest:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return ReceivedRequest(now, first.split(" ")[1], headers, body)
