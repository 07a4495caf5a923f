"""A real server with jobs in every state, for the browser tests and the screenshots."""

from __future__ import annotations

import http.server
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 120.0
END_S = 120.0
# `ELSEWHERE` stands for the address of a site that no visitor should reach.
HOSTILE = (
    b"<html><head><title>Shop</title><style>body{font-family:sans-serif;margin:2em}</style>"
    b"<script>parent.document.title='taken over';fetch('/ui/jobs')</script>"
    b"<link rel=preconnect href=ELSEWHERE>"
    b"<meta http-equiv=refresh content='0;/ui/'></head>"
    b"<body><h1>Garden chair</h1><p>49.00</p><img src=ELSEWHERE/x onerror=alert(1)>"
    b"<form action=/ui/signout method=post><button>Buy</button></form></body></html>"
)
STATUSES = {"missing": 404, "blocked": 403, "busy": 429}


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        word = self.path.strip("/").partition("/")[0]
        if word == "slow":
            time.sleep(20)
        self.send_response(STATUSES.get(word, 200))
        self.send_header("Content-Type", "text/html; charset=utf-8")
        body = HOSTILE.replace(b"ELSEWHERE", self.server.elsewhere.encode())  # type: ignore[attr-defined]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 256
    elsewhere = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away, as at a stop, is no error."""


def _count_connections(listener: socket.socket, leaks: list[str]) -> None:
    """Records every connection, even one without a request."""
    with suppress(OSError):  # Closed at the end.
        while True:
            connection, address = listener.accept()
            leaks.append(str(address))
            connection.close()


@dataclass(slots=True)
class DemoServer:
    """The address of the server, and the pages to look at, by name."""

    url: str
    site: str
    elsewhere: str
    leaks: list[str]
    paths: dict[str, str] = field(default_factory=dict)

    def call(self, method: str, path: str, body: Any = None, *, key: str = "dev") -> Any:
        reply = httpx.request(
            method, self.url + path, json=body, headers={"X-API-Key": key}, timeout=60
        )
        reply.raise_for_status()
        return reply.json() if reply.content else None

    def submit(self, name: str, pages: list[str], **fields: Any) -> Any:
        tasks = [{"url": f"{self.site}/{page}"} for page in pages]
        return self.call("POST", "/v1/jobs", {"name": name, "tasks": tasks, **fields})

    def wait_for_end(self, submitted: Any, *, key: str = "dev") -> None:
        ends_at = time.monotonic() + END_S
        while time.monotonic() < ends_at:
            run = self.call("GET", f"/v1/jobs/{submitted['job_id']}", key=key)["latest_run"]
            if run["terminal"]:
                return
            time.sleep(0.2)
        raise AssertionError("the run did not end")


def _drain(stream: Iterable[str]) -> None:
    """Reads the log of the server, so that the pipe never fills."""
    with suppress(ValueError):  # Closed at the end.
        for _ in stream:
            pass


@contextmanager
def a_demo_server(data_dir: Path, more: Mapping[str, str] | None = None) -> Iterator[DemoServer]:
    """Runs a server, and a site for it to fetch. `more` contains further environment variables."""
    leaks: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_count_connections, args=(listener, leaks), daemon=True).start()
    site = _Server(("127.0.0.1", 0), _Site)
    site.elsewhere = f"http://127.0.0.1:{listener.getsockname()[1]}"
    threading.Thread(target=site.serve_forever, daemon=True).start()
    environ = {
        **os.environ,
        "CONVEYOR_DATA_DIR": str(data_dir),
        "CONVEYOR_PORT": "0",
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
        "CONVEYOR_LOG": "json",
        **(more or {}),
    }
    command = (sys.executable, "-m", "conveyor.cli.main", "dev")
    program = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    assert program.stderr is not None
    try:
        url = ""
        for line in program.stderr:
            if found := re.search(r"The dashboard is at (http://\S+)/ui/", line):
                url = found[1]
                break
        assert url, "the server did not start"
        threading.Thread(target=_drain, args=(program.stderr,), daemon=True).start()
        own = f"http://127.0.0.1:{site.server_address[1]}"
        demo = DemoServer(url, own, site.elsewhere, leaks)
        yield demo
    finally:
        program.terminate()
        program.wait(30)
        # The thread has read to the end, because the pipe is closed on the other side.
        program.stderr.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        site.shutdown()
        site.server_close()


def submit_demo_jobs(demo: DemoServer) -> None:
    """Submits jobs in several states, and names the pages that show them."""
    ended = demo.submit(
        "prices-de",
        [*(f"item/{n}" for n in range(160)), *(f"missing/{n}" for n in range(9)), "blocked/1"],
        max_attempts=1,
        external_id="shop-42",
        metadata={"team": "pricing"},
        webhook={"url": f"{demo.site}/hook", "signature": False},
    )
    schedule = {"cron": "0 4 * * *", "timezone": "Europe/Berlin"}
    demo.submit("news-nightly", ["item/1"], type="scheduled", schedule=schedule)
    demo.wait_for_end(ended)
    live = demo.submit(
        "catalogue-full",
        [*(f"item/{n}" for n in range(300)), *(f"slow/{n}" for n in range(200))],
        host_limits={"concurrency": 5},
        max_attempts=1,
    )
    crawl_id = demo.call("POST", "/v1/crawls", {"url": f"{demo.site}/item/1"})["crawl_id"]
    crawl = demo.call("GET", f"/v1/jobs/{crawl_id}")
    paused = demo.submit("leads", [f"item/{n}" for n in range(40)], host_limits={"rate_per_s": 1})
    demo.call("POST", f"/v1/jobs/{paused['job_id']}/pause")
    base, live_base, paused_base, crawl_base = (
        f"/ui/jobs/{job_view['job_id']}/runs/{job_view['latest_run']['run_id']}"
        for job_view in (ended, live, paused, crawl)
    )
    api = f"/v1/jobs/{ended['job_id']}/runs/{ended['latest_run']['run_id']}"
    good = demo.call("GET", f"{api}/results?status=successful&limit=1")["results"][0]["task_id"]
    bad = demo.call("GET", f"{api}/results?status=failed&limit=1")["results"][0]["task_id"]
    demo.paths = {
        "overview": "/ui/",
        "jobs": "/ui/jobs",
        "job": f"/ui/jobs/{ended['job_id']}",
        "run-live": live_base,
        "run-ended": base,
        "run-paused": paused_base,
        "run-crawl": crawl_base,
        "tasks": f"{base}/tasks?status=failed",
        "hosts": f"{base}/hosts",
        "timeline": f"{base}/timeline",
        "task": f"{base}/tasks/{good}",
        "task-failed": f"{base}/tasks/{bad}",
        "new-job": "/ui/jobs/new",
        "schedules": "/ui/schedules",
        "webhooks": f"/ui/webhooks?job={ended['job_id']}",
        "system": "/ui/system",
        "delete": f"{base}/delete",
    }
