"""The arms that `bench ingest` compares; each runs alone in its own process.

`python -m bench.ingest_variants NAME COUNT FOLDER` prints one line of JSON. Another process sends
Conveyor's list over a real socket, so that the measured memory is the server's alone.
"""

from __future__ import annotations

import resource
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import trio

from conveyor.api.server.server import HttpServer
from conveyor.bootstrap.runtime import Runtime, open_runtime
from conveyor.config import Settings
from conveyor.domain import ids, limits
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import FIRST_BATCH, JobId, RunId
from conveyor.usecases.run import ingest, reconcile

RUN = RunId("01" + "0" * 24)
MESSAGE = """INSERT INTO messages (queue_id, job_id, task_id, shard, visible_at, in_hand, receives)
    VALUES (1, ?, ?, ?, ?, 0, 0)"""
ENDS = (b'{"tasks":[', b"]}")


class Ingested(msgspec.Struct, frozen=True):
    """`accept_s` is from the last byte of the list to the response; 0 for the bare loop."""

    tasks: int
    accept_s: float
    send_s: float
    seconds: float
    cpu_s: float
    rss_mb: float

    @property
    def rows_per_s(self) -> float:
        return self.tasks / self.seconds


def url_of(number: int) -> str:
    return f"https://example.com/catalogue/page-{number}"


def bare(count: int, folder: Path) -> Ingested:
    """Creates ids and inserts all columns into both tables, one commit a chunk, and nothing
    else."""
    from conveyor.domain.changes import TaskKey
    from conveyor.engines.sqlite import database, sql

    connection = sqlite3.connect(folder / "bare.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    for pragma in database.PRAGMAS:
        connection.execute(pragma)
    connection.execute(f"PRAGMA cache_size = {-database.WRITER_CACHE_KIB}")
    database.migrate(connection)
    insert = sql.insert_sql(sql.TABLES[TaskKey])
    cpu, wall, now = cpu_s(), time.perf_counter(), time.time()
    for start in range(0, count, limits.CHUNK_TASKS):
        numbers = range(start, min(start + limits.CHUNK_TASKS, count))
        names = ids.task_ids(RUN, FIRST_BATCH, numbers)
        shards = ids.shards_of(names, limits.TASK_SHARD_COUNT)
        lines = list(zip(names, shards, numbers, strict=True))
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(insert, [_row(*line, now) for line in lines])
        connection.executemany(MESSAGE, [(RUN, name, shard, now) for name, shard, _ in lines])
        connection.execute("COMMIT")
    seconds = time.perf_counter() - wall
    connection.close()
    return Ingested(count, 0, 0, seconds, cpu_s() - cpu, rss_mb())


def _row(name: str, shard: int, number: int, now: float) -> tuple[object, ...]:
    nothing = (None, None, None, None)
    head = (RUN, name, shard, FIRST_BATCH, number, url_of(number), "pending", now, now, "GET")
    return (*head, *nothing, 0, 0.0, 0, 0, None, *nothing[:3], "[]", 0, 0, None, None)


async def conveyor(count: int, folder: Path) -> Ingested:
    """Accepts the list over HTTP and ingests it as the ingest streamer does: validates, stages,
    writes under a fence, counts."""
    return await ingest_over_http(Settings(data_dir=folder / "data", port=0), count)


async def ingest_over_http(settings: Settings, count: int) -> Ingested:
    urls: list[str] = []
    async with open_runtime(settings, role="bench") as world, trio.open_nursery() as nursery:
        server = HttpServer(
            make_app=lambda ready: world.app(ready=ready),
            host=settings.host,
            port=0,
            on_listening=urls.append,
        )
        await nursery.start(server.run)
        command = [sys.executable, "-m", "bench.ingest_variants", "client", urls[0], str(count)]
        done = await trio.run_process(command, capture_stdout=True)
        sent = msgspec.json.decode(done.stdout, type=Sent)
        cpu, wall = cpu_s(), time.perf_counter()
        await _ingest(world, sent, count)
        seconds = time.perf_counter() - wall
        nursery.cancel_scope.cancel()
    return Ingested(count, sent.accept_s, sent.send_s, seconds, cpu_s() - cpu, rss_mb())


async def _ingest(world: Runtime, sent: Sent, count: int) -> None:
    job_id, run_id = JobId(sent.job_id), RunId(sent.run_id)
    for batch in await ingest.open_batches_of(world.env, job_id, run_id):
        await reconcile.finish_batch(world.env, batch)
    run = await world.env.store.read(RunKey(job_id, run_id))
    assert run is not None
    assert run.total == count, f"{run.total} of {count} lines"


class Sent(msgspec.Struct, frozen=True):
    job_id: str
    run_id: str
    send_s: float
    accept_s: float


def send(url: str, count: int) -> Sent:
    """Posts the list as a client that generates it while it sends."""
    address = urlsplit(url)
    assert address.hostname is not None
    size_bytes = sum(map(len, _body(count)))
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {address.netloc}\r\nX-API-Key: bench\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size_bytes}\r\n"
        "Connection: close\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), timeout=600) as connection:
        started_at = time.perf_counter()
        connection.sendall(head.encode())
        for piece in _body(count):
            connection.sendall(piece)
        sent = time.perf_counter()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        ended = time.perf_counter()
    status, _, content = answer.partition(b"\r\n\r\n")
    assert status.split()[1] in {b"201", b"202"}, answer[:500]
    job = msgspec.json.decode(content[content.index(b"{") : content.rindex(b"}") + 1])
    return Sent(job["job_id"], job["latest_run"]["run_id"], sent - started_at, ended - sent)


def _body(count: int) -> Iterator[bytes]:
    yield ENDS[0]
    for start in range(0, count, limits.CHUNK_TASKS):
        numbers = range(start, min(start + limits.CHUNK_TASKS, count))
        lines = ",".join(f'{{"url":"{url_of(number)}"}}' for number in numbers)
        yield (b"," if start else b"") + lines.encode()
    yield ENDS[1]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_arm(name: str, count: int, folder: Path) -> Ingested:
    command = [sys.executable, "-m", "bench.ingest_variants", name, str(count), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Ingested)


def _main(name: str, *rest: str) -> msgspec.Struct:
    if name == "client":
        return send(rest[0], int(rest[1]))
    count, folder = int(rest[0]), Path(rest[1])
    return bare(count, folder) if name == "bare" else trio.run(conveyor, count, folder)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(_main(*sys.argv[1:])).decode() + "\n")
