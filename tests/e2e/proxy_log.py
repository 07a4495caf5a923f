"""A proxy between a process and an AWS server, which counts the operations of the process."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

from tests.e2e.cloud import Cloud

_SERVICES = {
    "DynamoDB_20120810": "dynamodb",
    "AmazonSQS": "sqs",
    "AWSStepFunctions": "stepfunctions",
}
_TARGET = re.compile(rb"x-amz-target: (\w+)\.(\w+)", re.IGNORECASE)
_S3 = re.compile(rb"(PUT|GET|POST|HEAD|DELETE) /[^/ ]+(\S*) HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)
_AGENT = re.compile(rb"user-agent: (\w+)", re.IGNORECASE)
_PIECE = 1 << 16

Names = Callable[[bytes], list[str]]


def agents_in(piece: bytes) -> list[str]:
    """Returns the clients that send a User-Agent; our transport sends none."""
    return [name.decode() for name in _AGENT.findall(piece)]


def operations_in(piece: bytes) -> list[str]:
    requests = [
        f"{_SERVICES[service.decode()]}.{name.decode()}" for service, name in _TARGET.findall(piece)
    ]
    if requests:
        return requests
    return [f"s3.{_s3_operation(*match)}" for match in _S3.findall(piece)]


def _s3_operation(method: bytes, target: bytes, headers: bytes) -> str:
    query = target.partition(b"?")[2]
    match method:
        case b"PUT" if b"partNumber" in query:
            return "UploadPart"
        case b"PUT":
            return "CopyObject" if b"x-amz-copy-source" in headers.lower() else "PutObject"
        case b"GET":
            return "ListObjectsV2" if b"list-type" in query else "GetObject"
        case b"POST" if b"delete" in query:
            return "DeleteObjects"
        case b"POST":
            return "CreateMultipartUpload" if b"uploads" in query else "CompleteMultipartUpload"
        case _:
            return "HeadObject" if method == b"HEAD" else "DeleteObject"


@contextmanager
def counting_calls(
    cloud: Cloud, names_in: Names = operations_in
) -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """Yields settings under which a process calls AWS through proxies, and a counter of the
    operations that it calls, or of what `names_in` finds in its requests."""
    calls: Counter[str] = Counter()
    environ = {}
    with ExitStack() as proxies:
        for name in ("DYNAMODB", "SQS", "S3", "SFN"):
            variable = f"AWS_ENDPOINT_URL_{name}"
            port = urlsplit(cloud.environ[variable]).port
            assert port is not None
            environ[variable] = (
                f"http://127.0.0.1:{proxies.enter_context(_run_proxy(port, names_in, calls))}"
            )
        yield environ, calls


@contextmanager
def _run_proxy(to: int, names_in: Names, calls: Counter[str]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        thread = threading.Thread(target=_serve, args=(listening, to, names_in, calls))
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve(listening: socket.socket, to: int, names_in: Names, calls: Counter[str]) -> None:
    threads: list[threading.Thread] = []
    with suppress(OSError):  # The listening socket is closed at the end.
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", to))
            for args in ((client, server, names_in, calls), (server, client, _nothing_in, calls)):
                threads.append(threading.Thread(target=_forward, args=args, daemon=True))
                threads[-1].start()


def _nothing_in(answer: bytes) -> list[str]:
    return []


def _forward(
    source: socket.socket, sink: socket.socket, names_in: Names, calls: Counter[str]
) -> None:
    with suppress(OSError), source:
        while piece := source.recv(_PIECE):
            calls.update(names_in(piece))
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
