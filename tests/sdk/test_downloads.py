"""Downloads of many bodies at a time: each becomes a whole file or an error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from conveyor.sdk import ApiError, Client, Downloaded, RetryPolicy, Unreachable
from conveyor.sdk.downloads import is_direct
from tests.sdk.scripted import Answer, Scripted, problem


@pytest.fixture
def client(script: Scripted) -> Iterator[Client]:
    retry = RetryPolicy(backoff_s=0.0, attempts_max=3)
    with Client(script.url, "k", timeout_s=5, retry=retry) as client:
        yield client


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_downloaded_body_becomes_a_file(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    script.answer_with(*[Answer(200, b"same", {"Content-Type": "a/b"})] * 50)
    paths = {f"task-{number}": tmp_path / str(number) for number in range(50)}

    saved = client.download_all("job", paths, run_id="run")

    assert saved == dict.fromkeys(paths, Downloaded(4, hashlib.sha256(b"same").hexdigest(), "a/b"))
    assert files(tmp_path) == {str(number): b"same" for number in range(50)}
    assert {request.path for request in script.requests} == {
        f"/v1/jobs/job/runs/run/tasks/{task}/content?redirect=true" for task in paths
    }
    assert {request.headers["x-api-key"] for request in script.requests} == {"k"}


def test_a_missing_body_is_returned_as_its_error(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    script.answer_with(problem(404, "result_not_found"))

    saved = client.download_all("job", {"task": tmp_path / "page"})

    error = saved["task"]
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (404, "result_not_found")
    assert files(tmp_path) == {}


def test_an_interrupted_or_damaged_download_is_repeated(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    tag = '"' + hashlib.sha256(b"true").hexdigest() + '"'
    script.answer_with(
        Answer(200, b"tr", hangs_up=True),
        Answer(200, b"false", {"ETag": tag}),
        Answer(200, b"true", {"ETag": tag}),
    )

    client.download_all("job", {"task": tmp_path / "page"})

    assert files(tmp_path) == {"page": b"true"}


def test_a_server_outage_ends_all_downloads_and_leaves_no_partial_files(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    script.answer_with(*[Answer(200, b"half", hangs_up=True)] * 100)
    paths = {f"task-{number}": tmp_path / str(number) for number in range(20)}

    with pytest.raises(Unreachable):
        client.download_all("job", paths)

    assert files(tmp_path) == {}


def test_a_missing_folder_raises_file_not_found(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    script.answer_with(Answer(200, b"body"))

    with pytest.raises(FileNotFoundError):
        client.download_all("job", {"task": tmp_path / "missing" / "page"})


def test_redirects_are_followed_without_the_api_key(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    script.answer_with(Answer(302, b"", {"Location": "/elsewhere"}), Answer(200, b"body"))

    client.download_all("job", {"task": tmp_path / "page"})

    assert files(tmp_path) == {"page": b"body"}
    assert script.requests[1].path == "/elsewhere"
    assert "x-api-key" not in script.requests[1].headers


def test_endless_redirects_are_an_error(script: Scripted, client: Client, tmp_path: Path) -> None:
    script.answer_with(*[Answer(302, b"", {"Location": "/round"})] * 4)

    saved = client.download_all("job", {"task": tmp_path / "page"})

    error = saved["task"]
    assert isinstance(error, ApiError)
    assert error.status == 302


def test_a_server_behind_a_proxy_is_not_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert is_direct("https://conveyor.example", trust_env=True)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")

    assert not is_direct("https://conveyor.example", trust_env=True)
    assert is_direct("http://127.0.0.1:8080", trust_env=False)


def test_behind_a_proxy_bodies_are_downloaded_one_by_one(
    script: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", script.url)
    script.answer_with(Answer(200, b"body"), problem(404, "result_not_found"))

    with Client("http://conveyor.test", "k") as client:
        saved = client.download_all("job", {"a": tmp_path / "a", "b": tmp_path / "b"})

    assert files(tmp_path) == {"a": b"body"}
    assert isinstance(saved["b"], ApiError)
    assert (
        script.requests[0].path == "http://conveyor.test/v1/jobs/job/tasks/a/content?redirect=true"
    )
