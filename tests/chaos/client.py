"""A client that retries each request with the same key until it gets an answer.

It behaves as the documents ask customers to. If the server has died, it starts the server again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from conveyor.cli.demo import Site
from tests.crash.injection import EXIT_CODE
from tests.e2e.programs import Server, until
from tests.e2e.receiver import Receiver

RETRIED = {409, 429, 503}


@dataclass(slots=True)
class Client:
    """Repeats requests until they are answered. `deaths` counts the restarts of the server.

    `lives` are the crash points of the next starts; without one the server starts normally.
    """

    server: Server
    site: Site
    receiver: Receiver
    lives: list[str] = field(default_factory=list)
    deaths: int = 0
    _keys: int = 0

    def post(self, path: str, body: object = None, *, expect: int | None = None) -> Any:
        """Posts with the same key in every attempt. A response with status `expect` ends it too."""
        self._keys += 1
        headers = {"Idempotency-Key": f"key-{self._keys}"}
        return self._answer("POST", path, expect, json=body, headers=headers)

    def put(self, path: str, body: object) -> Any:
        return self._answer("PUT", path, None, json=body)

    def get(self, path: str) -> Any:
        return self._answer("GET", path, None)

    def upload(self, url: str, content: bytes) -> None:
        path = "/" + url.split("/", 3)[3]
        self._answer("PUT", path, None, content=content)

    def download(self, url: str) -> bytes:
        """Downloads from the server's current address, which changes when it restarts."""
        response = self._call_until_answered("GET", "/" + url.split("/", 3)[3])
        assert response.is_success, response.text
        return response.content

    def delete(self, path: str) -> None:
        """Deletes something. A repeated request may find that it is deleted already."""
        response = self._call_until_answered("DELETE", path)
        assert response.status_code in {202, 404}, response.text

    def remove(self, path: str) -> None:
        """Removes something that may be absent or in use."""
        response = self._call_until_answered("DELETE", path, 409)
        assert response.is_success or response.status_code in {404, 409}, response.text

    def stop_and_start(self) -> None:
        """Stops and starts the server, as an operator does. A crash while it stops is a death."""
        code = self.server.stop()
        self.deaths += code == EXIT_CODE
        self._restart()

    def finds_nothing(self, path: str) -> None:
        response = self._call_until_answered("GET", path)
        assert response.status_code == 404, response.text

    def submit(self, pages: Iterator[int] | range | tuple[int, ...], **more: Any) -> str:
        base = f"http://127.0.0.1:{self.site.port}/page"
        tasks = [{"url": f"{base}/{number}"} for number in pages]
        return str(self.post("/v1/jobs", {"tasks": tasks, **more})["job_id"])

    def ended(self, job_id: str) -> dict[str, Any]:
        def run() -> dict[str, Any] | None:
            run: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")["latest_run"]
            return run if run["terminal"] else None

        return until(f"the run of {job_id} to end", run, deadline_s=240)

    def completed(self, job_id: str, total: int) -> dict[str, Any]:
        run = self.ended(job_id)
        stats = run["stats"]
        assert run["status"] == "completed", run
        assert stats["total"] == stats["completed"] == total, run
        assert stats["successful"] + stats["failed"] == total, run
        return run

    def _answer(self, method: str, path: str, expect: int | None, **options: Any) -> Any:
        response = self._call_until_answered(method, path, expect, **options)
        assert response.is_success or response.status_code == expect, response.text
        return response.json() if response.content else None

    def _call_until_answered(
        self, method: str, path: str, expect: int | None = None, **options: Any
    ) -> httpx.Response:
        give_up_at = time.monotonic() + 180
        while time.monotonic() < give_up_at:
            if self.server.has_ended():
                self.deaths += 1
                self._restart()
            try:
                response = self.server.call(method, path, **options)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if response.status_code not in RETRIED - {expect}:
                return response
            time.sleep(0.1)
        raise AssertionError(f"{method} {path} was not answered")

    def _restart(self) -> None:
        life = {"TEST_CRASH_AT": self.lives.pop(0)} if self.lives else {}
        self.server.start(**life)
