"""Tests the service with a local ZenRows-compatible gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.cli.program import Program
from tests.e2e.programs import Server, until

pytestmark = pytest.mark.slow


class Gateway(BaseHTTPRequestHandler):
    """Returns a page for every URL; the account `broke` has no credit."""

    protocol_version = "HTTP/1.1"
    queries: list[dict[str, str]]

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.queries.append(query)
        if query["apikey"] == "broke":
            self._answer(402, b'{"code":"AUTH004","title":"no credit","detail":"Top up."}')
        else:
            self._answer(200, f"<p>{query['url']}</p>".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status >= 400 else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Cost", "0.001")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def a_gateway() -> Iterator[tuple[str, list[dict[str, str]]]]:
    requests: list[dict[str, str]] = []
    handler = type("Handler", (Gateway,), {"queries": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/", requests
        finally:
            server.shutdown()
            thread.join()


def ended(server: Server, key: str) -> dict[str, Any]:
    headers = {"X-API-Key": key}
    tasks = [{"url": f"https://example.com/{number}"} for number in range(5)]
    body = {"tasks": tasks, "zenrows_params": {"js_render": True}}
    job = server.call("POST", "/v1/jobs", json=body, headers=headers).json()

    def ended_run() -> dict[str, Any] | None:
        path = f"/v1/jobs/{job['job_id']}"
        run: dict[str, Any] = server.call("GET", path, headers=headers).json()["latest_run"]
        return run if run["terminal"] else None

    return until("the run to end", ended_run)


def test_the_gateway_gets_the_callers_key_and_its_cost_is_counted(tmp_path: Path) -> None:
    with a_gateway() as (url, requests):
        server = Server(tmp_path / "data")
        server.start(CONVEYOR_GATEWAY_URL=url, CONVEYOR_ALLOW_PRIVATE_TARGETS="0")
        try:
            run = ended(server, "rich")
        finally:
            server.kill()

    assert run["status"] == "completed"
    assert run["stats"]["successful"] == 5
    assert run["stats"]["spend"]["cost"] == pytest.approx(0.005)
    assert {query["apikey"] for query in requests} == {"rich"}
    assert {query["js_render"] for query in requests} == {"true"}
    assert sorted(query["url"] for query in requests) == [
        f"https://example.com/{n}" for n in range(5)
    ]


def test_a_list_stops_at_its_budget_and_continues_with_a_larger_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "list.txt").write_text(
        "\n".join(f"https://example.com/{number}" for number in range(10))
    )
    settings = {"CONVEYOR_DATA_DIR": "data", "CONVEYOR_CREDIT_COST": "0.001"}
    with a_gateway() as (url, requests):
        program = Program(tmp_path, {**settings, "CONVEYOR_GATEWAY_URL": f"{url}?apikey=rich"})
        command = ("scrape", "list.txt", "-o", "out", "--json", "--budget")

        first = program.run(*command, "cost=0.0045")
        asked_first = len(requests)
        second = program.run(*command, "cost=0.5")

    assert (first.code, second.code) == (1, 0)
    assert "The budget is spent with 4 of 10 pages done." in first.err
    assert json.loads(second.lines[-1])["successful"] == 10
    assert (asked_first, len(requests)) == (4, 10)


def test_an_account_without_credit_fails_the_run_and_says_so(tmp_path: Path) -> None:
    with a_gateway() as (url, _):
        server = Server(tmp_path / "data")
        server.start(CONVEYOR_GATEWAY_URL=url)
        try:
            run = ended(server, "broke")
        finally:
            server.kill()

    assert run["status"] == "failed"
    assert run["failure_reason"] == "insufficient_credits"
    assert run["stats"]["completed"] == 0
