"""A stub of DynamoDB, SQS and S3 on loopback that returns fixed responses and stores nothing.

It runs in its own process, on uvloop's bare protocol, so that it never limits the arm it serves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TARGET = re.compile(rb"x-amz-target: *\w+\.(\w+)", re.IGNORECASE)
_BODY = json.dumps({"job": "01JD0000000000000000000000", "task": "t" * 26, "shard": 3})


def _messages(count: int) -> dict[str, object]:
    message = {
        "MessageId": "219f8380-5770-4cc2-8c3e-5c715e145f5e",
        "ReceiptHandle": "r" * 180,
        "MD5OfBody": hashlib.md5(_BODY.encode()).hexdigest(),
        "Body": _BODY,
        "Attributes": {"ApproximateReceiveCount": "1"},
    }
    return {"Messages": [message] * count}


ANSWERS = {
    b"ReceiveMessage": _messages(10),
    b"UpdateItem": {"Attributes": {"status": {"S": "done"}, "claim": {"N": "3"}}},
    b"BatchWriteItem": {"UnprocessedItems": {}},
}


def _response(body: bytes, kind: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f'{head}ETag: "d41d8cd98f00b204e9800998ecf8427e"\r\n\r\n'.encode() + body


_READY = {
    name: _response(json.dumps(answer).encode(), "application/x-amz-json-1.0")
    for name, answer in ANSWERS.items()
}
_STORED = _response(b"", "application/xml")


class Stub(asyncio.Protocol):
    """Answers each request when its last byte has arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < whole:
                # An AWS SDK sends the body only after a "100 Continue".
                if whole > end + 4 == len(self._buffer) and b"100-continue" in head.lower():
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            self._buffer = self._buffer[whole:]
            target = _TARGET.search(head)
            self._transport.write(_READY[target[1]] if target else _STORED)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def running_stub() -> Iterator[str]:
    command = (sys.executable, "-m", "bench.aws_stub")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.terminate()


if __name__ == "__main__":
    uvloop.run(serve())
