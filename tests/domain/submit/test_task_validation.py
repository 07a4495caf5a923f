"""Which lines are valid tasks, and the reason that the contract gives for each that is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conveyor.domain import limits
from conveyor.domain.model import Method, TaskSpec
from conveyor.domain.submit.admission import (
    Refusal,
    Secrets,
    TaskDraft,
    check_metadata,
    check_task,
    invalid_task,
)
from conveyor.domain.submit.scraper_params import DIRECT_SUPPORT, REMOTE_SUPPORT
from conveyor.domain.submit.target import TargetPolicy

URL = "https://example.com/page"
OPEN_WORLD = TargetPolicy()


def checked(**fields: Any) -> tuple[TaskSpec, Secrets | None]:
    if "body" in fields:
        fields["body"] = msgspec.Raw(fields["body"])
    return check_task(3, TaskDraft(**{"url": URL, **fields}), {}, OPEN_WORLD, REMOTE_SUPPORT)


def refusal_of(**fields: Any) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        checked(**fields)
    return refusal.value


def test_a_line_with_only_a_url_is_a_task_without_secrets() -> None:
    spec, secrets = checked()

    assert spec == TaskSpec(index=3, url=URL)
    assert secrets is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (None, "malformed_url"),
        (17, "malformed_url"),
        ("example.com", "malformed_url"),
        ("https://exa mple.com/", "malformed_url"),
        ("https://user:secret@example.com/", "malformed_url"),
        ("ftp://example.com/", "unsupported_scheme"),
        ("https:///path", "missing_host"),
        ("https://example.com/" + "x" * limits.URL_CHARS_MAX, "url_too_long"),
        ("http://127.0.0.1/", "forbidden_target"),
        ("http://169.254.169.254/latest/", "forbidden_target"),
        ("http://localhost/", "forbidden_target"),
        ("http://example.com:6379/", "forbidden_target"),
    ],
)
def test_a_url_that_may_not_be_fetched_is_refused_with_its_reason(url: object, reason: str) -> None:
    assert refusal_of(url=url).reason == reason


def test_the_target_is_not_checked_if_a_remote_gateway_fetches_it() -> None:
    draft = TaskDraft(url="http://10.0.0.1:8080/")

    spec, _ = check_task(0, draft, {}, None, REMOTE_SUPPORT)

    assert spec.url == "http://10.0.0.1:8080/"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/?token=SECRET",
        "https://user:SECRET@example.com/",
        "http://127.0.0.1/?SECRET",
        "ftp://user:SECRET@example.com/?x",
    ],
)
def test_a_refusal_shows_the_start_of_the_url_but_no_secret(url: str) -> None:
    refusal = refusal_of(url=url)

    assert refusal.value is not None
    assert url.startswith(refusal.value)
    assert "SECRET" not in refusal.value


def test_a_refusal_shows_only_printable_text() -> None:
    refusal = refusal_of(url="https://exämple\ud800 .com/")

    assert refusal.value is not None
    assert refusal.value.isascii()
    msgspec.json.encode(invalid_task(0, refusal))


@pytest.mark.parametrize("value", ["GET", "get", "Post", "POST"])
def test_methods_are_read_in_any_case(value: str) -> None:
    spec, _ = checked(method=value)

    assert spec.method is Method(value.upper())


@pytest.mark.parametrize("value", ["PUT", "", "TRACE", 5, ["GET"]])
def test_other_methods_are_unsupported(value: object) -> None:
    assert refusal_of(method=value).reason == "unsupported_method"


@pytest.mark.parametrize("key", ["js_render", "js_instructions", "json_response"])
@pytest.mark.parametrize("where", ["job", "task"])
def test_a_post_cannot_be_rendered(key: str, where: str) -> None:
    draft = TaskDraft(url=URL, method="POST", params={key: True} if where == "task" else None)

    with pytest.raises(Refusal) as refusal:
        check_task(0, draft, {key: "true"} if where == "job" else {}, OPEN_WORLD, REMOTE_SUPPORT)

    assert (refusal.value.reason, refusal.value.value) == ("method_param_conflict", key)


def test_a_line_that_the_gateway_cannot_fetch_is_refused_by_its_parameter() -> None:
    draft = TaskDraft(url=URL, params={"js_render": True})

    with pytest.raises(Refusal) as refusal:
        check_task(0, draft, {}, OPEN_WORLD, DIRECT_SUPPORT)

    assert (refusal.value.reason, refusal.value.value) == ("unsupported_param", "js_render")


def test_a_body_that_is_a_json_string_is_sent_as_a_form() -> None:
    _, secrets = checked(method="POST", body=b'"a=1&b=2"')

    assert secrets == Secrets(body=b"a=1&b=2", content_type="application/x-www-form-urlencoded")


@pytest.mark.parametrize("body", [b'{"a": 1}', b"[1]", b"5", b"true"])
def test_any_other_json_body_is_sent_unchanged_as_json(body: bytes) -> None:
    _, secrets = checked(method="POST", body=body)

    assert secrets == Secrets(body=body, content_type="application/json")


def test_a_null_body_is_no_body() -> None:
    assert checked(method="GET", body=b"null")[1] is None


@pytest.mark.parametrize(
    ("method", "body", "reason"),
    [
        ("GET", b'"a=1"', "body_not_allowed"),
        ("POST", b'"' + b"x" * limits.TASK_BODY_BYTES_MAX + b'"', "body_too_large"),
        ("POST", b'{"a":', "body_malformed"),
        ("POST", b'"\xff"', "body_malformed"),
    ],
)
def test_a_body_that_cannot_be_sent_is_refused(method: str, body: bytes, reason: str) -> None:
    assert refusal_of(method=method, body=body).reason == reason


def test_a_body_that_is_nested_too_deeply_is_refused_or_sent_unchanged() -> None:
    """Python 3.14 parses more levels than earlier versions, and more than fit into a body."""
    body = b"[" * 5000 + b"]" * 5000

    outcome: object
    try:
        _, secrets = checked(method="POST", body=body)
        outcome = None if secrets is None else secrets.body
    except Refusal as refusal:
        outcome = refusal.reason

    assert outcome in {"body_malformed", body}


def test_the_size_of_metadata_in_bytes_is_limited() -> None:
    value = {f"key{n}": "\N{SNOWMAN}" * limits.METADATA_VALUE_CHARS_MAX for n in range(20)}

    assert refusal_of(metadata=value).reason == "metadata_too_large"


def test_a_task_whose_total_size_is_too_large_is_refused() -> None:
    metadata = {f"key{n}": "x" * 1000 for n in range(11)}
    body = b'"' + b"x" * (limits.TASK_BODY_BYTES_MAX - 2) + b'"'

    assert refusal_of(method="POST", body=body, metadata=metadata).reason == "task_too_large"


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "ä", "a/b", "a#b", "a\n", 5, ["a"]])
def test_an_external_id_with_other_characters_is_refused(value: object) -> None:
    assert refusal_of(external_id=value).reason == "invalid_external_id"


def test_an_external_id_of_allowed_characters_is_kept() -> None:
    spec, _ = checked(external_id="Row-1_a.b")

    assert spec.external_id == "Row-1_a.b"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "metadata_too_large"),
        (["a"], "metadata_too_large"),
        ({f"k{n}": "v" for n in range(limits.METADATA_KEYS_MAX + 1)}, "metadata_too_large"),
        ({"k": "v" * (limits.METADATA_VALUE_CHARS_MAX + 1)}, "metadata_too_large"),
        ({"k": 5}, "metadata_too_large"),
        ({"": "v"}, "metadata_key_invalid"),
        ({"k" * (limits.METADATA_KEY_CHARS_MAX + 1): "v"}, "metadata_key_invalid"),
        ({"a\nb": "v"}, "metadata_key_invalid"),
        ({"k": "\ud800"}, "metadata_key_invalid"),
    ],
)
def test_metadata_must_be_a_small_map_of_text(value: object, reason: str) -> None:
    refusal = refusal_of(metadata=value)

    assert refusal.reason == reason
    msgspec.json.encode(invalid_task(0, refusal))


def test_empty_metadata_is_stored_as_none() -> None:
    assert check_metadata(None) is None
    assert check_metadata({}) is None
    assert check_metadata({"k": "v"}) == {"k": "v"}


@pytest.mark.parametrize(
    ("params", "reason", "value"),
    [
        ("js_render", "invalid_param_value", "zenrows_params"),
        ({"nope": 1}, "unknown_param", "nope"),
        ({"wait": 1.5}, "invalid_param_value", "wait"),
        ({"custom_headers": {"X": "a\r\nB: c"}}, "invalid_param_value", "custom_headers"),
        ({"custom_headers": {"Transfer-Encoding": "chunked"}}, "invalid_param_value", None),
        ({"custom_headers": {"Connection": "close"}}, "invalid_param_value", None),
        ({"custom_headers": {"Host": "evil"}}, "invalid_param_value", None),
        ({"custom_headers": {"Content-Length": "0"}}, "invalid_param_value", None),
        ({"custom_headers": {"Proxy-Authorization": "x"}}, "invalid_param_value", None),
        ({"custom_headers": {f"X-{n}": "1" for n in range(10_000)}}, "invalid_param_value", None),
        ({"custom_headers": {"X": "1" * 1_000_000}}, "invalid_param_value", None),
    ],
)
def test_a_lines_own_parameters_are_checked_like_a_jobs(
    params: object, reason: str, value: str | None
) -> None:
    refusal = refusal_of(params=params)

    assert refusal.reason == reason
    assert refusal.value == (value or "custom_headers")


def test_headers_of_a_line_are_separated_to_be_encrypted() -> None:
    spec, secrets = checked(params={"custom_headers": {"Cookie": "CANARY"}, "wait": 5})

    assert spec.params == {"wait": "5"}
    assert secrets == Secrets(headers={"Cookie": "CANARY"})
    assert b"CANARY" not in msgspec.json.encode(spec)


def test_a_refused_line_is_reported_by_its_index() -> None:
    reported = invalid_task(17, Refusal("malformed_url", "exa mple"))

    assert (reported.index, reported.reason, reported.value) == (17, "malformed_url", "exa mple")
