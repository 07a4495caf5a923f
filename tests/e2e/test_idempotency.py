"""Tests POSTs whose process dies at five moments: repeated with its key, each has one effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.programs import Server, a_site, until

pytestmark = pytest.mark.slow

KEY = {"Idempotency-Key": "the same"}
LATER = {"rate": {"every": 1, "unit": "day"}}
MOMENTS = {
    "before the claim": "store.commit:1:before",
    "after the claim": "store.commit:1:after",
    "in the middle of the work": "store.commit:2:before",
    "after the work, before the answer": "store.commit:2:after",
    "after the answer": None,
}


@dataclass(frozen=True)
class Post:
    """A request, and a function that counts the objects that it created."""

    path: str
    body: Any
    count: Callable[[Server], int]

    def send(self, server: Server) -> httpx.Response | None:
        if server.url == "ended":
            return None
        try:
            return server.call("POST", self.path, json=self.body, headers=KEY)
        except httpx.TransportError:
            return None


def _submit(server: Server, url: str) -> Post:
    body = {"type": "scheduled", "schedule": LATER, "tasks": [{"url": url}]}
    return Post("/v1/jobs", body, lambda server: len(server.call("GET", "/v1/jobs").json()["jobs"]))


def _add(server: Server, url: str) -> Post:
    job_id = server.call("POST", "/v1/jobs", json={"status": "open"}).json()["job_id"]
    server.call("POST", f"/v1/jobs/{job_id}/pause")

    def count(server: Server) -> int:
        run = server.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
        return int(run["stats"]["total"])

    return Post(f"/v1/jobs/{job_id}/tasks", {"tasks": [{"url": url}]}, count)


def _rotate(server: Server, url: str) -> Post:
    def count(server: Server) -> int:
        keys = server.call("GET", "/v1/hmac/keys").json()
        return sum(keys.get(slot) is not None for slot in ("active", "candidate"))

    return Post("/v1/hmac/keys/rotate", None, count)


def _rerun(server: Server, url: str) -> Post:
    job_id = server.call("POST", "/v1/jobs", json={"tasks": [{"url": url}]}).json()["job_id"]
    until("the run to end", lambda: server.ended_run(job_id))

    def count(server: Server) -> int:
        return len(server.call("GET", f"/v1/jobs/{job_id}/runs").json()["runs"]) - 1

    return Post(f"/v1/jobs/{job_id}/rerun", None, count)


@contextmanager
def _prepare(data: Path, make: Callable[[Server, str], Post]) -> Iterator[tuple[Server, Post]]:
    server = Server(data)
    with a_site() as site:
        server.start()
        try:
            post = make(server, site.urls(1)[0])
            server.stop()
            yield server, post
        finally:
            server.kill()


@pytest.mark.parametrize("make", [_submit, _add, _rotate, _rerun])
@pytest.mark.parametrize("point", MOMENTS.values(), ids=MOMENTS)
def test_a_repeated_post_has_one_effect_after_a_crash(
    tmp_path: Path, point: str | None, make: Callable[[Server, str], Post]
) -> None:
    with _prepare(tmp_path / "data", make) as (server, post):
        server.start(**({"TEST_CRASH_AT": point} if point else {}))
        first = post.send(server)
        if point is None:
            server.kill()
        else:
            until("the crash", lambda: server.has_ended() or None)
        server.start()

        second = post.send(server)
        third = post.send(server)

        assert second is not None
        assert third is not None
        assert second.is_success, second.text
        assert (third.status_code, third.content) == (second.status_code, second.content)
        assert first is None or (first.status_code, first.content) == (
            second.status_code,
            second.content,
        )
        assert post.count(server) == 1
