"""How the client sends jobs and reads answers, also unexpected ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.sdk import ApiError, BadId, Client, SubmitJobRequest, TaskInput, Unreachable
from conveyor.sdk.errors import INTERVAL_S_MAX, OUTAGE_S_MAX, PollBackoff
from tests.sdk.scripted import Answer, Scripted, problem

UNAVAILABLE = Unreachable("http://a", "refused")


def last_request(script: Scripted) -> object:
    return msgspec.json.decode(script.requests[-1].body)


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://a", "http://", "http://a/?b", "h t"])
def test_a_base_url_that_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="like http://"):
        Client(url, "k")


@pytest.mark.parametrize("key", ["", " k", "clé", "a\nb"])
def test_an_api_key_that_no_header_can_contain_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Client("http://127.0.0.1:1", key)


def test_a_client_whose_block_has_ended_sends_nothing(tmp_path: Path) -> None:
    with Client("http://127.0.0.1:1", "key") as client:
        pass

    with pytest.raises(RuntimeError, match="has been closed"):
        client.get("job")
    with pytest.raises(RuntimeError, match="has been closed"):
        client.download_all("job", {"task": tmp_path / "page"})


def test_a_base_url_may_end_in_a_slash_or_in_the_version() -> None:
    for url in ("http://a.example", "http://a.example/", "http://a.example/v1/"):
        with Client(url, "k") as client:
            assert client.base_url == "http://a.example"


@pytest.mark.parametrize("job_id", ["..", "a/b", "a?b", "", "a b", "é"])
def test_text_that_cannot_be_an_id_is_never_sent_in_a_path(
    script: Scripted, client: Client, job_id: str
) -> None:
    for ask in (client.get, client.stop, client.delete):
        with pytest.raises(BadId):
            ask(job_id)
    with pytest.raises(BadId):
        client.delete_run("job", job_id)

    assert script.requests == []


def test_a_list_of_urls_is_sent_without_unset_fields(script: Scripted, client: Client) -> None:
    script.answer_with(problem(400, "bad"))

    with pytest.raises(ApiError):
        client.submit(["https://a.example/", "https://b.example/"])

    assert last_request(script) == {
        "tasks": [{"url": "https://a.example/"}, {"url": "https://b.example/"}]
    }


URL = "https://a.example/"


@pytest.mark.parametrize(
    ("job", "body"),
    [
        (URL, {"tasks": [{"url": URL}]}),
        (TaskInput(url=URL, external_id="a"), {"tasks": [{"url": URL, "external_id": "a"}]}),
        ({"url": URL, "metadata": {"k": "v"}}, {"tasks": [{"url": URL, "metadata": {"k": "v"}}]}),
        ([URL, {"url": URL, "method": "POST", "body": {"q": 1}}],
         {"tasks": [{"url": URL}, {"url": URL, "method": "POST", "body": {"q": 1}}]}),
        ({"tasks": [URL], "name": "Mine", "webhook": {"url": URL}},
         {"tasks": [{"url": URL}], "name": "Mine", "webhook": {"url": URL, "signature": False}}),
        ({"file_input_id": "f1"}, {"file_input_id": "f1"}),
    ],
)  # fmt: skip
def test_a_job_may_be_a_url_a_struct_a_dict_or_a_list_of_them(
    script: Scripted, client: Client, job: Any, body: dict[str, Any]
) -> None:
    script.answer_with(problem(400, "bad"))

    with pytest.raises(ApiError):
        client.submit(job)

    assert last_request(script) == body


@pytest.mark.parametrize("job", [{"urls": [URL]}, [{"address": URL}], [{"url": object()}]])
def test_an_invalid_job_is_refused_before_it_is_sent(
    script: Scripted, client: Client, job: Any
) -> None:
    with pytest.raises(ValueError, match=r"^This is no (SubmitJobRequest|TaskInput): "):
        client.submit(job)

    assert script.requests == []


def test_a_job_is_sent_with_every_field_that_was_set(script: Scripted, client: Client) -> None:
    script.answer_with(problem(400, "bad"))
    body = msgspec.Raw(b'{"a":1}')
    task = TaskInput(url="https://a.example/", method="POST", body=body, external_id="x")

    with pytest.raises(ApiError):
        client.submit(SubmitJobRequest(tasks=[task], status="open", name="n", priority=2))

    assert last_request(script) == {
        "status": "open",
        "tasks": [
            {"url": "https://a.example/", "external_id": "x", "method": "POST", "body": {"a": 1}}
        ],
        "name": "n",
        "priority": 2,
    }


def test_an_api_error_contains_all_fields_of_the_problem(script: Scripted, client: Client) -> None:
    event = {
        "type": "about:blank",
        "title": "Some tasks are invalid",
        "status": 400,
        "code": "invalid_argument",
        "detail": "1 of 2 is bad.",
        "errors": [{"pointer": "/tasks", "detail": "bad"}],
        "invalid_tasks": [{"index": 1, "reason": "malformed_url", "value": "x"}],
        "something": "new",
    }
    script.answer_with(Answer(400, msgspec.json.encode(event), {"X-Request-ID": "r-9"}))

    with pytest.raises(ApiError) as caught:
        client.submit(["https://a.example/", "x"])

    error = caught.value
    assert (error.status, error.code, error.title) == (400, "invalid_argument", event["title"])
    assert (error.detail, error.request_id) == ("1 of 2 is bad.", "r-9")
    assert [(task.index, task.reason) for task in error.invalid_tasks] == [(1, "malformed_url")]
    assert [problem.pointer for problem in error.errors] == ["/tasks"]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(502, b"<h1>Bad gateway</h1>"),
        Answer(200, b"<h1>Welcome</h1>"),
        Answer(200, b"\xff\xfe"),
        Answer(200, b'{"jobs": 7}'),
        Answer(404, b'{"detail": "no code"}'),
    ],
)
def test_an_unexpected_answer_is_an_api_error(
    script: Scripted, client: Client, answer: Answer
) -> None:
    script.answer_with(answer)

    with pytest.raises(ApiError) as caught:
        list(client.list())

    assert (caught.value.status, caught.value.code) == (answer.status, "unexpected_answer")


def test_pages_are_requested_only_when_they_are_needed(script: Scripted, client: Client) -> None:
    row = {
        "task_id": "0" * 32,
        "run_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "index": 0,
        "url": "https://a.example/",
        "status": "pending",
        "result_url": None,
        "created_at": "2026-01-01T00:00:00.000Z",
        "updated_at": "2026-01-01T00:00:00.000Z",
    }
    first = {"results": [row], "next_cursor": "c d"}
    script.answer_with(Answer(200, msgspec.json.encode(first)))

    results = client.results("job", status="processing")
    next(results)

    assert len(script.requests) == 1
    script.answer_with(Answer(200, msgspec.json.encode({"results": [row], "next_cursor": None})))
    assert len(list(results)) == 1
    assert [request.path for request in script.requests] == [
        "/v1/jobs/job/results?status=processing&limit=500",
        "/v1/jobs/job/results?status=processing&limit=500&cursor=c+d",
    ]


def test_an_interrupted_download_leaves_no_file(
    script: Scripted, client: Client, tmp_path: Path, pauses: list[float]
) -> None:
    script.answer_with(*[Answer(200, b"half", hangs_up=True)] * 5)

    with pytest.raises(Unreachable):
        client.download("job", "task", tmp_path / "page")

    assert len(pauses) == 4
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_is_repeated(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    script.answer_with(
        Answer(200, b"ha", hangs_up=True), Answer(200, b"whole", {"Content-Type": "a/b"})
    )

    saved = client.download("job", "task", tmp_path / "page")

    assert (tmp_path / "page").read_bytes() == b"whole"
    assert (saved.size_bytes, saved.content_type) == (5, "a/b")
    assert saved.sha256 == hashlib.sha256(b"whole").hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_body_that_differs_from_its_digest_is_not_kept(
    script: Scripted, client: Client, tmp_path: Path
) -> None:
    tag = '"' + hashlib.sha256(b"true").hexdigest() + '"'
    script.answer_with(Answer(200, b"false", {"ETag": tag}), Answer(200, b"true", {"ETag": tag}))

    client.download("job", "task", tmp_path / "page")

    assert (tmp_path / "page").read_bytes() == b"true"


def test_a_redirect_is_followed_without_the_api_key(script: Scripted, client: Client) -> None:
    script.answer_with(Answer(302, b"", {"Location": "/elsewhere"}), Answer(200, b"body"))

    assert client.content("job", "task") == b"body"
    assert script.requests[0].headers["x-api-key"] == "k"
    assert script.requests[1].path == "/elsewhere"
    assert "x-api-key" not in script.requests[1].headers


def test_endless_redirects_are_an_error(script: Scripted, client: Client) -> None:
    script.answer_with(*[Answer(302, b"", {"Location": "/round"})] * 4)

    with pytest.raises(ApiError, match="302"):
        client.content("job", "task")


def test_the_poll_interval_of_a_wait_grows_to_its_maximum() -> None:
    pace = PollBackoff(begun_at=100.0)

    assert [pace.interval_s(100.0 + elapsed) for elapsed in (0, 5, 3600)] == [
        pytest.approx(0.1),
        pytest.approx(0.5),
        INTERVAL_S_MAX,
    ]


def test_a_wait_tolerates_a_short_outage_only() -> None:
    pace = PollBackoff(begun_at=100.0)
    pace.record_success(200.0)

    assert pace.tolerates(UNAVAILABLE, 200.0 + OUTAGE_S_MAX - 1)
    assert not pace.tolerates(UNAVAILABLE, 200.0 + OUTAGE_S_MAX)
    assert not pace.tolerates(ApiError(404, "not_found", "Not found"), 200.0)


def test_a_wait_ends_at_its_deadline() -> None:
    pace = PollBackoff(begun_at=100.0, timeout_s=10)

    assert pace.interval_s(109.9) == pytest.approx(0.1)
    with pytest.raises(TimeoutError, match="10 s"):
        pace.interval_s(110.0)
