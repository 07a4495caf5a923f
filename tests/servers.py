"""Starts local servers that stand in for AWS and Redis, when a test first needs them.

Each test process starts its own servers, with their own ports and directories on loopback. `make
test` installs them. If a server is not installed its tests are skipped; in CI they fail.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
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
# ministack treats an access key of twelve digits as the id of a separate account.
ACCESS_KEY, SECRET_KEY = "111122223333", "conveyor-test-secret"


def free_ports(count: int) -> list[int]:
    """Returns different free ports: each is bound until the last one is found."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


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


def find_program(program: str | Path) -> str:
    """Returns the path of a server's program. If it is missing the test is skipped, or fails in CI.

    An environment may be half installed: `make` creates `.installed` when it is complete.
    """
    path = shutil.which(program)
    is_complete = not isinstance(program, Path) or (program.parents[1] / ".installed").exists()
    if path is None or not is_complete:
        complaint = f"{Path(program).name} is not installed: run `make test`"
        if os.environ.get("CI") == "true":
            fail(complaint)
        skip(complaint)
    return path


@contextmanager
def running(
    command: Sequence[str], folder: Path, ready: Callable[[], bool], env: Mapping[str, str] = {}
) -> Iterator[None]:
    """Starts the server, runs the block when the server answers, and ends the server after it."""
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
    """Returns a check whether a GET of the URL gets a response with a status below 500."""

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
    """Sends a command to Redis and returns the first bytes of the reply; empty if it is down."""
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
    with running(
        [find_program(SERVERS / "ministack")], folder, answers(f"{url}/_ministack/health"), own
    ):
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
    command = [find_program(LOCALSTACK), "-m", "localstack.runtime.main"]
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
    command = [find_program(SERVERS / "weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
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
    command = [find_program(SERVERS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with running(command, folder, answers(f"{url}/moto-api/")):
        yield url


@contextmanager
def a_redis(folder: Path, port: int | None = None) -> Iterator[str]:
    port = port or free_port()
    with running(_redis(port), folder, lambda: redis_says(port, "PING") == b"+PONG\r\n"):
        yield f"redis://127.0.0.1:{port}"


@contextmanager
def a_redis_cluster(folder: Path, port: int | None = None) -> Iterator[str]:
    """Runs a cluster of one node, which is enough for CROSSSLOT errors and cluster clients."""
    port, bus = port or free_port(), free_port()
    command = [*_redis(port), "--cluster-enabled", "yes", "--cluster-port", str(bus)]

    def is_ready() -> bool:
        redis_says(port, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        return b"cluster_state:ok" in redis_says(port, "CLUSTER", "INFO")

    with running(command, folder, is_ready):
        yield f"redis://127.0.0.1:{port}"


def _redis(port: int) -> list[str]:
    program = find_program("redis-server")
    return [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", "."]


# PostgreSQL refuses to run as root; Debian's package creates this user.
_POSTGRES_USER = "postgres"
_POSTGRES_SETTINGS = (
    "listen_addresses=127.0.0.1",
    "max_connections=200",
    "shared_buffers=128MB",
    "autovacuum_naptime=5s",
)


# The settings of an operator: no commit is lost in a crash.
DURABLE = ("fsync=on", "synchronous_commit=on", "shared_buffers=512MB", "max_wal_size=4GB")


@contextmanager
def a_replica(primary: Postgres) -> Iterator[Postgres]:
    """Runs a replica of a running server."""
    folder = Path(tempfile.mkdtemp(prefix="conveyor-postgres-"))
    server = Postgres(folder, free_port())
    try:
        server.copy_of(primary)
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def a_postgres(settings: Sequence[str] = ("fsync=off",)) -> Iterator[Postgres]:
    """Runs a server with a new, empty data directory."""
    folder = Path(tempfile.mkdtemp(prefix="conveyor-postgres-"))
    server = Postgres(folder, free_port(), settings)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Postgres:
    """A server that can be killed and started again on the same data and port."""

    def __init__(self, folder: Path, port: int, settings: Sequence[str] = ()) -> None:
        self.folder = folder
        self.port = port
        self.url = f"postgresql://conveyor@127.0.0.1:{port}/postgres"
        self._settings = (*_POSTGRES_SETTINGS, *settings)
        self._user = _POSTGRES_USER if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def create(self) -> None:
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        command = [_postgres_program("initdb"), "-D", str(self.folder / "data"), "-U", "conveyor"]
        command += ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        result = subprocess.run(
            command, user=self._user, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if result.returncode:
            fail(f"initdb failed:\n{result.stderr[-2000:]}")

    def copy_of(self, primary: Postgres) -> None:
        """Makes the data directory a replica that follows a running primary."""
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        command = [_postgres_program("pg_basebackup"), "-D", str(self.folder / "data")]
        command += ["-d", primary.url, "-R", "-X", "stream", "-c", "fast"]
        subprocess.run(command, user=self._user, cwd=self.folder, check=True, capture_output=True)

    def start(self) -> None:
        command = [_postgres_program("postgres"), "-D", str(self.folder / "data")]
        command += ["-p", str(self.port), "-k", ""]
        command += [word for setting in self._settings for word in ("-c", setting)]
        log = self.folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                user=self._user,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        _wait_until(self._answers, self._process, log)

    def _answers(self) -> bool:
        command = [_postgres_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def cpu_s(self) -> float:
        """Returns the CPU seconds of the server and of its backends, including ended ones."""
        ticks = 0
        for directory in Path("/proc").iterdir():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except (OSError, IndexError):
                continue
            if directory.name == str(self.pid):
                ticks += sum(map(int, fields[11:15]))
            elif fields[1] == str(self.pid):
                ticks += sum(map(int, fields[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Ends the server without a checkpoint, as a crash does; its backends end too."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGQUIT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _postgres_program(name: str) -> str:
    """Finds a program of PostgreSQL; Debian stores those of each version outside of PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return find_program(str(versions[-1]) if versions else name)
