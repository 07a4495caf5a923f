"""Requests that a client repeats while processes crash: the preparation of each request, and a
check that it had its effect exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.programs import until

Answer = httpx.Response


@dataclass(frozen=True, slots=True)
class Urls:
    """The pages to scrape, and the URL of the webhook receiver."""

    pages: list[str]
    receiver: str

    def tasks(self, count: int) -> list[dict[str, str]]:
        return [{"url": url} for url in self.pages[:count]]


@dataclass(slots=True)
class RepeatedRequest:
    """A request that is repeated with its key until it is answered."""

    name: str
    method: str
    path: str
    body: Any
    key: str
    verify: Callable[[httpx.Client], str | None]
    answer: Answer | None = None

    def send(self, client: httpx.Client) -> Answer | None:
        """Sends the request once. Returns None if the server did not answer."""
        try:
            headers = {"Idempotency-Key": self.key}
            return client.request(self.method, self.path, json=self.body, headers=headers)
        except httpx.TransportError:
            return None

    def send_until_answered(self, client: httpx.Client) -> str | None:
        """Repeats the request until it is answered. Returns a problem, or None."""
        first = None if self.answer is None or _asks_for_retry(self.answer) else self.answer
        self.answer = until("an answer", lambda: self._send_once(client), deadline_s=180, every_s=1)
        if not self.answer.is_success:
            return f"{self.name}: {self.answer.status_code} {self.answer.text}"
        is_new = first is not None and first.content != self.answer.content
        return f"{self.name}: its answer changed" if is_new and self.method == "POST" else None

    def _send_once(self, client: httpx.Client) -> Answer | None:
        answer = self.send(client)
        return None if answer is None or _asks_for_retry(answer) else answer


def _asks_for_retry(answer: Answer) -> bool:
    """Returns whether the response asks for a retry, as while another process holds the key. Such a
    response is not stored under the key, so the next one may differ."""
    return answer.status_code >= 500 or "Retry-After" in answer.headers


@dataclass(slots=True)
class StepFactory:
    """Prepares requests on a server that does not crash."""

    client: httpx.Client
    urls: Urls
    count: int = 0
    steps: dict[str, Callable[[], RepeatedRequest]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = {
            "submit": lambda: self._submit(5),
            "submit inline": lambda: self._submit(83),
            "submit later": lambda: self._submit(84),
            "submit upload": self._submit_upload,
            "add tasks": self._add_tasks,
            "close": self._close,
            "stop": self._stop,
            "rerun": self._rerun,
            "delete": self._delete,
            "export": self._export,
            "set webhook": self._set_webhook,
        }

    def _key(self) -> str:
        self.count += 1
        return f"key-{self.count}"

    def _post(self, path: str, body: Any = None) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def _job(self, count: int, **fields: Any) -> str:
        body = {"tasks": self.urls.tasks(count), **fields}
        job_id: str = self._post("/v1/jobs", body)["job_id"]
        return job_id

    def _stopped_job(self) -> str:
        job_id = self._job(5)
        self._post(f"/v1/jobs/{job_id}/stop")
        return job_id

    def _submit(self, count: int) -> RepeatedRequest:
        key = self._key()
        body = {
            "tasks": self.urls.tasks(count),
            "external_id": key,
            "webhook": {"url": self.urls.receiver},
        }
        return _with_job_check(
            RepeatedRequest("submit", "POST", "/v1/jobs", body, key, _no_check), count
        )

    def _submit_upload(self) -> RepeatedRequest:
        key, lines = self._key(), 20
        slot = self._post("/v1/job_inputs", {"format": "text"})
        content = "\n".join(self.urls.pages[:lines]).encode()
        headers = {"Content-Type": slot["upload"].get("headers", {}).get("Content-Type", "")}
        headers = {name: value for name, value in headers.items() if value}
        put = httpx.put(slot["upload"]["url"], content=content, headers=headers, trust_env=False)
        assert put.is_success, put.text
        body = {"file_input_id": slot["file_input_id"], "external_id": key}
        return _with_job_check(
            RepeatedRequest("upload", "POST", "/v1/jobs", body, key, _no_check), lines
        )

    def _add_tasks(self) -> RepeatedRequest:
        job_id = self._job(2, status="open")
        body = {"tasks": self.urls.tasks(3), "last_batch": True}
        return self._on(job_id, "add tasks", "POST", "/tasks", body, _until_ended(job_id, 5))

    def _close(self) -> RepeatedRequest:
        job_id = self._job(2, status="open")
        return self._on(job_id, "close", "POST", "/close", None, _until_ended(job_id, 2))

    def _stop(self) -> RepeatedRequest:
        job_id = self._job(5)
        return self._on(job_id, "stop", "POST", "/stop", None, _is_stopped(job_id))

    def _rerun(self) -> RepeatedRequest:
        job_id = self._stopped_job()
        return self._on(job_id, "rerun", "POST", "/rerun", None, _until_ended(job_id, 5, runs=2))

    def _delete(self) -> RepeatedRequest:
        job_id = self._job(5)
        return self._on(job_id, "delete", "DELETE", "", None, _is_gone(job_id))

    def _export(self) -> RepeatedRequest:
        job_id = self._stopped_job()
        run_id = self.client.get(f"/v1/jobs/{job_id}").json()["latest_run"]["run_id"]
        path = f"/runs/{run_id}/exports"
        request = self._on(job_id, "export", "POST", path, None, _no_check)
        request.verify = _is_exported(request)
        return request

    def _set_webhook(self) -> RepeatedRequest:
        job_id = self._stopped_job()
        body = {"url": self.urls.receiver, "signature": False}
        return self._on(job_id, "set webhook", "PUT", "/webhook", body, _has_webhook(job_id))

    def _on(
        self,
        job_id: str,
        name: str,
        method: str,
        path: str,
        body: Any,
        verify: Callable[[httpx.Client], str | None],
    ) -> RepeatedRequest:
        return RepeatedRequest(name, method, f"/v1/jobs/{job_id}{path}", body, self._key(), verify)


def _no_check(_: httpx.Client) -> None:
    return None


def _with_job_check(request: RepeatedRequest, total: int) -> RepeatedRequest:
    """Adds a check to a submit: its job must end with `total` tasks."""

    def verify(client: httpx.Client) -> str | None:
        assert request.answer is not None
        return _until_ended(request.answer.json()["job_id"], total)(client)

    request.verify = verify
    return request


def _run(client: httpx.Client, job_id: str) -> dict[str, Any] | None:
    answer = client.get(f"/v1/jobs/{job_id}")
    return answer.json()["latest_run"] if answer.is_success else None


def _until_ended(job_id: str, total: int, runs: int = 1) -> Callable[[httpx.Client], str | None]:
    def verify(client: httpx.Client) -> str | None:
        run = _run(client, job_id)
        all_runs = client.get(f"/v1/jobs/{job_id}/runs").json()["runs"]
        is_right = run is not None and run["status"] == "completed" and len(all_runs) == runs
        if not is_right or run is None or run["stats"]["completed"] != total:
            return f"job {job_id}: {len(all_runs)} runs, the latest {run}"
        return None

    return verify


def _is_stopped(job_id: str) -> Callable[[httpx.Client], str | None]:
    def verify(client: httpx.Client) -> str | None:
        run = _run(client, job_id)
        return None if run and run["status"] == "stopped" else f"job {job_id}: {run}"

    return verify


def _is_gone(job_id: str) -> Callable[[httpx.Client], str | None]:
    def verify(client: httpx.Client) -> str | None:
        status = client.get(f"/v1/jobs/{job_id}").status_code
        return None if status == 404 else f"job {job_id}: {status}"

    return verify


def _has_webhook(job_id: str) -> Callable[[httpx.Client], str | None]:
    def verify(client: httpx.Client) -> str | None:
        status = client.get(f"/v1/jobs/{job_id}/webhook").status_code
        return None if status == 200 else f"webhook of {job_id}: {status}"

    return verify


def _is_exported(request: RepeatedRequest) -> Callable[[httpx.Client], str | None]:
    def verify(client: httpx.Client) -> str | None:
        assert request.answer is not None
        export = client.get(f"{request.path}/{request.answer.json()['export_id']}").json()
        return None if export["status"] == "completed" else f"{request.path}: {export}"

    return verify
