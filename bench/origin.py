"""Serves one page of a given size after a given think time, from its own process.

It uses uvloop's bare protocol so that it never limits the arm that fetches from it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import uvloop


class Page(asyncio.Protocol):
    """Answers every request on the connection with the same page, in order."""

    def __init__(self, response: bytes, think_s: float) -> None:
        self._response = response
        self._think_s = think_s
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        *requests, self._rest = (self._rest + data).split(b"\r\n\r\n")
        for _ in requests:
            self._loop.call_later(self._think_s, self._answer)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._response)


async def serve(size_bytes: int, think_s: float, proof: str) -> None:
    body = os.urandom(size_bytes // 2).hex().encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n"
    response = head.encode() + body
    tls = None
    if proof:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(proof)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Page(response, think_s), "127.0.0.1", 0, backlog=2048, ssl=tls
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def running_origin(*, size_bytes: int, think_s: float, proof: Path | None = None) -> Iterator[str]:
    """Serves the page while the block runs, and yields its URL; with `proof`, over TLS."""
    arguments = [str(size_bytes), str(think_s), str(proof or "")]
    command = [sys.executable, "-m", "bench.origin", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            scheme = "https" if proof else "http"
            yield f"{scheme}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("think_s", type=float)
    parser.add_argument("proof")
    options = parser.parse_args()
    uvloop.run(serve(options.size_bytes, options.think_s, options.proof))
