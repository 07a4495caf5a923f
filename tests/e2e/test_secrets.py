"""Tests that no secret of a caller is found in the files and logs of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from conveyor.cli.demo import is_flaky
from tests.e2e.programs import a_server, a_site, until

pytestmark = pytest.mark.slow

KEY, HEADER, COOKIE, BODY = (f"CANARY-{name}-4711" for name in ("key", "header", "cookie", "body"))


def test_no_forwarded_secret_is_stored_or_logged_in_the_clear(tmp_path: Path) -> None:
    with a_site() as site, a_server(tmp_path / "data") as server:
        tasks = [
            {"url": url, "zenrows_params": {"custom_headers": {"Cookie": COOKIE}}}
            for url in site.urls(150)
        ]
        tasks.append({"url": site.urls(1)[0], "method": "POST", "body": {"secret": BODY}})
        request = {
            "tasks": tasks,
            "zenrows_params": {"custom_headers": {"Authorization": HEADER}},
        }
        headers = {"X-API-Key": KEY, "Idempotency-Key": "one"}
        job = server.call("POST", "/v1/jobs", json=request, headers=headers).json()
        until(
            "the run to end",
            lambda: (
                server.call("GET", f"/v1/jobs/{job['job_id']}", headers=headers).json()[
                    "latest_run"
                ]["terminal"]
                or None
            ),
        )
        body_text = server.call("GET", f"/v1/jobs/{job['job_id']}", headers=headers).text
        server.stop()

    leaks = [
        (path.name, secret)
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file()
        for secret in (KEY, HEADER, COOKIE, BODY)
        if secret.encode() in path.read_bytes()
    ]
    assert leaks == []
    assert not any(secret in body_text for secret in (KEY, HEADER, COOKIE, BODY))


def test_a_terminated_server_hands_back_its_tasks_and_exits_with_0(tmp_path: Path) -> None:
    with a_site() as site, a_server(tmp_path / "data") as server:
        tasks = [{"url": url} for url in site.urls(400)]
        job_id = server.call("POST", "/v1/jobs", json={"tasks": tasks}).json()["job_id"]
        until(
            "some progress",
            lambda: _count_completed(server.call("GET", f"/v1/jobs/{job_id}").json()),
        )

        code = server.stop()
        server.start()
        run = until("the run to end", lambda: server.ended_run(job_id))

    assert code == 0
    assert run["stats"]["completed"] == 400
    # One fetch, a second if SIGTERM interrupted the first, and one more for a flaky page.
    assert all(count <= 2 + is_flaky(number) for number, count in site.request_counts.items())


def _count_completed(job: dict[str, dict[str, dict[str, int]]]) -> int | None:
    return job["latest_run"]["stats"]["completed"] or None
