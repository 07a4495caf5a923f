"""Which requests the client repeats, how often, and with which idempotency key."""

from __future__ import annotations

import socket

import pytest

from conveyor.sdk import ApiError, Client, RetryPolicy, Unreachable
from tests.sdk.scripted import Answer, Scripted, problem

NO_RUN = Answer(200, b'{"jobs": [], "next_cursor": null}')


def test_a_post_is_repeated_with_the_key_of_its_first_attempt(
    script: Scripted, client: Client
) -> None:
    script.answer_with(
        problem(503, "unavailable"), Answer(200, b"{", hangs_up=True), problem(400, "bad")
    )

    with pytest.raises(ApiError, match="400 bad"):
        client.submit(["https://example.com/"])

    keys = {request.headers["idempotency-key"] for request in script.requests}
    assert len(script.requests) == 3
    assert len(keys) == 1
    assert len({request.body for request in script.requests}) == 1


def test_two_posts_have_different_keys(script: Scripted, client: Client) -> None:
    script.answer_with(problem(400, "bad"), problem(400, "bad"))

    for _ in range(2):
        with pytest.raises(ApiError):
            client.stop("job")

    assert len({request.headers["idempotency-key"] for request in script.requests}) == 2


def test_a_caller_may_choose_the_idempotency_key(script: Scripted, client: Client) -> None:
    script.answer_with(problem(400, "bad"))

    with pytest.raises(ApiError):
        client.rerun("job", statuses=["failed", "pending"], idempotency_key="mine")

    (request,) = script.requests
    assert request.headers["idempotency-key"] == "mine"
    assert request.path == "/v1/jobs/job/rerun?status=failed%2Cpending"


def test_a_get_has_no_idempotency_key(script: Scripted, client: Client) -> None:
    script.answer_with(NO_RUN)

    assert list(client.list()) == []
    assert "idempotency-key" not in script.requests[0].headers
    assert script.requests[0].headers["x-api-key"] == "k"


@pytest.mark.parametrize(("status", "code"), [(503, "not_ready"), (409, "idempotency_in_progress")])
def test_a_retry_waits_for_the_retry_after_of_the_server(
    script: Scripted, client: Client, pauses: list[float], status: int, code: str
) -> None:
    script.answer_with(problem(status, code, retry_after="7"), NO_RUN)

    list(client.list())

    assert pauses == [7.0]


@pytest.mark.parametrize(
    "answer", [problem(409, "run_not_stoppable"), problem(500, "internal"), problem(404, "none")]
)
def test_a_permanent_error_is_not_retried(script: Scripted, client: Client, answer: Answer) -> None:
    script.answer_with(answer)

    with pytest.raises(ApiError):
        client.stop("job")

    assert len(script.requests) == 1


def test_an_unreachable_server_is_given_up_after_the_last_attempt(pauses: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

    with Client(url, "k", sleep=pauses.append) as client, pytest.raises(Unreachable) as caught:
        client.get("job")

    assert caught.value.url == url
    assert len(pauses) == RetryPolicy().attempts_max - 1
    assert pauses == sorted(pauses)


def test_no_retry_is_made_if_the_server_asks_for_too_long_a_wait() -> None:
    policy = RetryPolicy(retry_after_s_max=60)
    patient = ApiError(503, "unavailable", "No", retry_after_s=60.0)
    never = ApiError(503, "unavailable", "No", retry_after_s=61.0)

    assert policy.pause_s(patient, attempt=1, luck=0) == 60.0
    assert policy.pause_s(never, attempt=1, luck=0) is None


def test_no_retry_follows_the_last_attempt() -> None:
    policy = RetryPolicy(attempts_max=3, backoff_s=1, backoff_s_max=1.5)
    away = Unreachable("http://a", "refused")

    pauses = [policy.pause_s(away, attempt=attempt, luck=1) for attempt in (1, 2, 3)]

    assert pauses == [1.0, 1.5, None]
