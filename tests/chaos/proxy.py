"""A proxy that injects faults: delays, closed or silent connections, lost responses."""

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

# The probability of each fault per request. "swallowed" is the hardest: the request had its effect,
# but its caller gets no response.
ROUGH: Mapping[str, float] = {"late": 0.02, "cut": 0.01, "swallowed": 0.01, "silent": 0.002}


@dataclass(slots=True)
class Proxy:
    """A proxy in front of one server. `rates` may be changed while it runs."""

    host: str
    port: int
    randomness: Random
    rates: Mapping[str, float] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    address: str = ""

    async def serve(self, client: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream(self.host, self.port)
            async with client, server, trio.open_nursery() as nursery:
                swallowing = trio.Event()
                nursery.start_soon(
                    self._send_requests, client, server, swallowing, nursery.cancel_scope
                )
                nursery.start_soon(
                    self._send_responses, client, server, swallowing, nursery.cancel_scope
                )
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # The client or the server closed the connection.

    async def _send_requests(
        self,
        client: trio.SocketStream,
        server: trio.SocketStream,
        swallowing: trio.Event,
        scope: trio.CancelScope,
    ) -> None:
        async for data in client:
            match self._choose_fault():
                case "cut":
                    break
                case "late":
                    await trio.sleep(self.randomness.uniform(0.0, LATE_S))
                case "silent":
                    await trio.sleep(SILENCE_S)
                    break
                case "swallowed":
                    swallowing.set()
            await server.send_all(data)
        scope.cancel()

    async def _send_responses(
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

    def _choose_fault(self) -> str | None:
        for fault, rate in self.rates.items():
            if self.randomness.random() < rate:
                self.fired[fault] += 1
                return fault
        return None


@contextmanager
def running_proxy(url: str, seed: int) -> Iterator[Proxy]:
    """Runs a proxy in a separate thread. It injects no faults until `rates` is set."""
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
