"""`conveyor scrape` killed at each of its writes: the next command completes the folder.

The simulator does not run this command, because a scrape has no engine. Here one process after the
other is killed at its first, second, third ... write, until one lives to its end.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest

from conveyor.cli.scrape.command import scrape
from conveyor.config import Settings

# From a server without threads or sockets of the test, which has imported this module.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, "conveyor.cli.scrape.run"])
PATIENCE_S = 60
PAGES = 2
WRITES = ("fsync", "ftruncate", "mkdir", "open", "pwrite", "rename", "replace", "unlink", "write")


def page_of(path: str) -> bytes:
    return f"<p>{path}</p>".encode() * 100


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingSite

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.asked[self.path] += 1
        body = page_of(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


class CountingSite(ThreadingHTTPServer):
    daemon_threads = True
    asked: Counter[str]
    lock = Lock()

    def urls(self, pages: int) -> list[str]:
        return [f"http://127.0.0.1:{self.server_port}/{number}" for number in range(pages)]


@pytest.fixture(scope="module")
def site() -> Iterator[CountingSite]:
    with CountingSite(("127.0.0.1", 0), Handler) as server:
        server.asked = Counter()
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def run_scrape(folder: str, args: list[str], kill_at: int) -> None:
    """The life of a process: it is killed at this write; at none if that is 0."""
    os.chdir(folder)
    os.dup2(os.open("out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if kill_at:
        _die_at(kill_at)
    scrape.main(args, obj=Settings(allow_private_targets=True))


def _die_at(number: int) -> None:
    numbers = count(1)

    def dying(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **options: Any) -> Any:
            if next(numbers) == number:
                if name == "write":  # The half of it arrives.
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return write

    for name in WRITES:
        setattr(os, name, dying(name, getattr(os, name)))


def end_of(folder: Path, args: list[str], kill_at: int = 0) -> int | None:
    process = PROCESSES.Process(target=run_scrape, args=(str(folder), args, kill_at))
    process.start()
    process.join(PATIENCE_S)
    return process.exitcode


def whole_lines_in(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def assert_whole(out: Path, pages: int) -> None:
    rows = whole_lines_in(out)
    assert [(row["index"], row["status"]) for row in rows] == [
        (index, "successful") for index in range(pages)
    ]
    for row in rows:
        content = (out / row["file"]).read_bytes()
        if "offset" not in row:
            assert hashlib.sha256(content).hexdigest() == row["sha256"]
        else:
            assert row["offset"] + row["length"] <= len(content)
    names = {path.name for path in out.iterdir()}
    assert names == {row["file"] for row in rows} | {"results.jsonl", ".conveyor"}
    assert not list((out / ".conveyor" / "part").iterdir())


@pytest.mark.parametrize("page_format", ["files", "jsonl", "warc"])
def test_a_scrape_that_is_killed_at_any_write_goes_on(
    site: CountingSite, tmp_path: Path, page_format: str
) -> None:
    args = [*site.urls(PAGES), "-o", "out", "--format", page_format, "-c", "1", "--ignore-robots"]
    for number in count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        site.asked.clear()
        if end_of(folder, args, number) == 0:
            break
        done = {row["index"] for row in whole_lines_in(folder / "out")}
        for page in (folder / "out").glob("*.html"):
            assert page.read_bytes() == page_of(f"/{int(page.stem)}"), number

        assert end_of(folder, args) == 0, (number, (folder / "out.log").read_text())
        assert_whole(folder / "out", PAGES)
        # One page is in flight at a time, so at most one is fetched again.
        assert all(site.asked[f"/{index}"] == 1 for index in done), (number, site.asked)
        assert site.asked.total() <= PAGES + 1, (number, site.asked)
    assert number > 10


@pytest.mark.parametrize("action", ["--restart", "--update"])
def test_an_action_that_is_killed_at_any_write_is_repeated_with_success(
    site: CountingSite, tmp_path: Path, action: str
) -> None:
    options = ["-o", "out", "-c", "1", "--ignore-robots"]
    args = [*site.urls(PAGES), *options, action]
    for number in count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert end_of(folder, [*site.urls(PAGES - 1), *options]) == 0
        if end_of(folder, args, number) == 0:
            break

        assert end_of(folder, args) == 0, (number, (folder / "out.log").read_text())
        assert_whole(folder / "out", PAGES)
    assert number > 10
