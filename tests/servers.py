"""Servers that stand in for AWS and Redis: started when a test asks, once per worker process.

Each has ports and a directory of its own on loopback. `make test` installs them; where one is
missing its tests are skipped, except in CI, where they fail.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
SERVERS = ROOT / ".venv-servers" / "bin"
LOCALSTACK = ROOT / ".venv-localstack" / "bin" / "python"
START_S = 90.0
STOP_S = 2.0
# Twelve digits are an account of its own to ministack.
ACCESS_KEY, SECRET_KEY = "111122223333", "conveyor-test-secret"


def free_ports(count: int) -> list[int]:
    """All different: each is held until the last one is known."""
    held = [socket.socket() for _ in range(count)]
    try:
        for job in held:
            job.bind(("127.0.0.1", 0))
        return [job.getsockname()[1] for job in held]
    finally:
        for job in held:
            job.close()


def free_port() -> int:
    return free_ports(1)[0]


def fail(complaint: str) -> NoReturn:
    """Fails the test. A benchmark, which runs without pytest, ends instead."""
    if (pytest := sys.modules.get("pytest")) is not None:
        pytest.fail(complaint)
    raise SystemExit(complaint)


def skip(complaint: str) -> NoReturn:
    """Skips the test. A benchmark ends instead."""
    if (pytest := sys.modules.get("pytest")) is not None:
        pytest.skip(complaint)
    raise SystemExit(complaint)


def found(program: str | Path) -> str:
    """The path of a server's program; without it the test is skipped, or fails in CI.

    An environment of ours may be half made: `make` leaves a mark when it is done.
    """
    path = shutil.which(program)
    is_whole = not isinstance(program, Path) or (program.parents[1] / ".installed").exists()
    if path is None or not is_whole:
        complaint = f"{Path(program).name} is not installed: run `make test`"
        if os.environ.get("CI") == "true":
            fail(complaint)
        skip(complaint)
    return path


@contextmanager
def running(
    command: Sequence[str], folder: Path, ready: Callable[[], bool], env: Mapping[str, str] = {}
) -> Iterator[None]:
    """The server, from when it answers; ended, with all it started, on leaving."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until(ready, server, folder / "server.log")
        yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until(ready: Callable[[], bool], server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while not ready():
        if server.poll() is not None or time.monotonic() > until:
            fail(f"{server.args!r} did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def answers(url: str) -> Callable[[], bool]:
    """Whether anything but a failure of the server itself comes back."""

    def ask() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return error.code < 500
        except OSError:
            return False

    return ask


def redis_says(port: int, *words: str) -> bytes:
    """The first bytes of Redis's answer; empty when there is no Redis."""
    command = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    try:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=2)) as connection:
            connection.sendall(command.encode())
            return connection.recv(4096)
    except OSError:
        return b""


@contextmanager
def a_ministack(folder: Path, env: Mapping[str, str] = {}) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "IOT_MTLS_ENABLED": "0", **env}
    with running([found(SERVERS / "ministack")], folder, answers(f"{url}/_ministack/health"), own):
        yield url


@contextmanager
def a_localstack(folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {
        "GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "SERVICES": "sqs",
        "EAGER_SERVICE_LOADING": "1",
        "DNS_ADDRESS": "0",
        "DISABLE_EVENTS": "1",
        "SQS_DELAY_RECENTLY_DELETED": "1",
        "SQS_ENDPOINT_STRATEGY": "path",
        "LOCALSTACK_HOST": f"127.0.0.1:{port}",
        "FILESYSTEM_ROOT": str(folder / "state"),
    }
    command = [found(LOCALSTACK), "-m", "localstack.runtime.main"]
    with running(command, folder, answers(f"{url}/_localstack/health"), env):
        yield url


@contextmanager
def a_seaweed(folder: Path) -> Iterator[str]:
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    folder.mkdir(parents=True)
    (folder / "data").mkdir()
    grants = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [grants]}))
    command = [found(SERVERS / "weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={folder / 'data'}", f"-s3.config={folder / 's3.json'}", "-s3"]
    command += ["-s3.allowDeleteBucketNotEmpty=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.max=500", "-master.volumeSizeLimitMB=256"]
    command += [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    command += [f"-{n}.port.grpc={p}" for n, p in zip(names, ports[len(names) :], strict=True)]
    url = f"http://127.0.0.1:{ports[3]}"
    with running(command, folder, answers(f"{url}/")):
        yield url


@contextmanager
def a_moto(folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [found(SERVERS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with running(command, folder, answers(f"{url}/moto-api/")):
        yield url


@contextmanager
def a_redis(folder: Path, port: int | None = None) -> Iterator[str]:
    port = port or free_port()
    with running(_redis(port), folder, lambda: redis_says(port, "PING") == b"+PONG\r\n"):
        yield f"redis://127.0.0.1:{port}"


@contextmanager
def a_redis_cluster(folder: Path, port: int | None = None) -> Iterator[str]:
    """One node that owns every slot: enough for CROSSSLOT and for clients that speak cluster."""
    port, bus = port or free_port(), free_port()
    command = [*_redis(port), "--cluster-enabled", "yes", "--cluster-port", str(bus)]

    def is_whole() -> bool:
        redis_says(port, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        return b"cluster_state:ok" in redis_says(port, "CLUSTER", "INFO")

    with running(command, folder, is_whole):
        yield f"redis://127.0.0.1:{port}"


def _redis(port: int) -> list[str]:
    program = found("redis-server")
    return [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", "."]
