"""A proxy that mistreats connections: late, cut off, silent, or with the answer swallowed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

import trio

CHUNK = 65_536
SILENCE_S = 3.0
LATE_S = 1.0

# How likely each is, for every request that comes along. A swallowed answer is the worst of them:
# the request has had its effect, and nobody will ever hear of it.
ROUGH: Mapping[str, float] = {"late": 0.02, "cut": 0.01, "swallowed": 0.01, "silent": 0.002}


@dataclass(slots=True)
class Proxy:
    """In front of one server. `rates` may be changed while it runs."""

    host: str
    port: int
    draw: Random
    rates: Mapping[str, float] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    address: str = ""

    async def serve(self, client: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream(self.host, self.port)
            async with client, server, trio.open_nursery() as nursery:
                swallowing = trio.Event()
                nursery.start_soon(self._ask, client, server, swallowing, nursery.cancel_scope)
                nursery.start_soon(self._answer, client, server, swallowing, nursery.cancel_scope)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # One of the two hung up.

    async def _ask(
        self,
        client: trio.SocketStream,
        server: trio.SocketStream,
        swallowing: trio.Event,
        scope: trio.CancelScope,
    ) -> None:
        async for data in client:
            match self._deed():
                case "cut":
                    break
                case "late":
                    await trio.sleep(self.draw.uniform(0.0, LATE_S))
                case "silent":
                    await trio.sleep(SILENCE_S)
                    break
                case "swallowed":
                    swallowing.set()
            await server.send_all(data)
        scope.cancel()

    async def _answer(
        self,
        client: trio.SocketStream,
        server: trio.SocketStream,
        swallowing: trio.Event,
        scope: trio.CancelScope,
    ) -> None:
        async for data in server:
            if swallowing.is_set():
                break
            await client.send_all(data)
        scope.cancel()

    def _deed(self) -> str | None:
        for deed, rate in self.rates.items():
            if self.draw.random() < rate:
                self.fired[deed] += 1
                return deed
        return None


@contextmanager
def a_proxy(url: str, seed: int) -> Iterator[Proxy]:
    """In a thread of its own, on a port of its own; kind until it is given rates."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy(parts.hostname, parts.port, Random(seed))
    up: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []
    is_up = threading.Event()

    async def run() -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        proxy.address = parts._replace(netloc=f"127.0.0.1:{port}").geturl()
        with trio.CancelScope() as scope:
            up.append((trio.lowlevel.current_trio_token(), scope))
            is_up.set()
            await trio.serve_listeners(proxy.serve, listeners)

    thread = threading.Thread(target=trio.run, args=(run,))
    thread.start()
    is_up.wait(10)
    try:
        yield proxy
    finally:
        token, scope = up[0]
        token.run_sync_soon(scope.cancel)
        thread.join()
