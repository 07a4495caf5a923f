"""The signatures equal those of botocore."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.aws_signature import (
    UNSIGNED,
    Credentials,
    Scope,
    authorization,
    canonical_query,
    escape_path,
    payload_hash,
    presign_query,
    stamp,
)

NOW = 1_790_000_000.0
HOST = "bucket.example.com:8333"

plain = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
# Characters that urlsplit keeps in a URL: no control characters, and no surrogates, which cannot be
# encoded.
texts = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), max_size=30)
keys = st.builds(Credentials, plain, plain, st.none() | plain)
queries = st.lists(st.tuples(texts.filter(bool), texts), max_size=4)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)
headers_too = st.dictionaries(
    st.from_regex(r"x-amz-[a-z]{3,9}", fullmatch=True), values, max_size=3
)


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    now = datetime.datetime.fromtimestamp(NOW, datetime.UTC).replace(tzinfo=None)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: now)
    return iter(())


def reference(request: AWSRequest, auth: Any) -> str:
    auth.add_auth(request)
    return str(request.headers["Authorization"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=texts, query=queries, body=st.binary(max_size=50), keys=keys, more=headers_too)
def test_an_s3_request_is_signed_as_botocore_does(
    key: str, query: list[tuple[str, str]], body: bytes, keys: Credentials, more: dict[str, str]
) -> None:
    more = {name: value for name, value in more.items() if name != "x-amz-date"}
    path, text = f"/{escape_path(key)}", canonical_query(query)
    url = f"http://{HOST}{path}" + (f"?{text}" if text else "")
    request = AWSRequest(method="PUT", url=url, headers=more, data=body)
    boto_keys = BotoCredentials(keys.access_key, keys.secret_key, keys.token)
    expected = reference(request, botocore.auth.S3SigV4Auth(boto_keys, "s3", "eu-west-1"))

    headers = [*more.items(), ("host", HOST), ("x-amz-date", stamp(NOW))]
    headers.append(("x-amz-content-sha256", payload_hash(body)))
    if keys.token:
        headers.append(("x-amz-security-token", keys.token))
    scope = Scope("s3", "eu-west-1", keys)
    signed = authorization("PUT", path, text, headers, payload_hash(body), scope)

    assert signed == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=texts, keys=keys)
def test_an_unsigned_body_is_declared_as_botocore_does(key: str, keys: Credentials) -> None:
    path = f"/{escape_path(key)}"
    request = AWSRequest(method="PUT", url=f"https://{HOST}{path}", data=b"any")
    request.context["client_config"] = type(
        "Config", (), {"s3": {"payload_signing_enabled": False}}
    )
    boto_keys = BotoCredentials(keys.access_key, keys.secret_key, keys.token)
    expected = reference(request, botocore.auth.S3SigV4Auth(boto_keys, "s3", "us-east-1"))

    headers = [("host", HOST), ("x-amz-date", stamp(NOW)), ("x-amz-content-sha256", UNSIGNED)]
    if keys.token:
        headers.append(("x-amz-security-token", keys.token))
    signed = authorization("PUT", path, "", headers, UNSIGNED, Scope("s3", "us-east-1", keys))

    assert signed == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=50), keys=keys, service=st.sampled_from(["dynamodb", "sqs"]))
def test_a_json_request_is_signed_as_botocore_does(
    body: bytes, keys: Credentials, service: str
) -> None:
    own = {"content-type": "application/x-amz-json-1.0", "x-amz-target": "Service.Operation"}
    request = AWSRequest(method="POST", url=f"https://{HOST}/", headers=own, data=body)
    boto_keys = BotoCredentials(keys.access_key, keys.secret_key, keys.token)
    expected = reference(request, botocore.auth.SigV4Auth(boto_keys, service, "us-east-1"))

    headers = [*own.items(), ("host", HOST), ("x-amz-date", stamp(NOW))]
    if keys.token:
        headers.append(("x-amz-security-token", keys.token))
    scope = Scope(service, "us-east-1", keys)

    assert authorization("POST", "/", "", headers, payload_hash(body), scope) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=texts,
    query=st.dictionaries(texts.filter(bool), texts.filter(bool), max_size=3),
    keys=keys,
    expires_s=st.integers(1, 604800),
    kind=st.none() | st.sampled_from(["text/csv", "text/html; charset=utf-8"]),
)
def test_a_presigned_url_has_the_parameters_of_botocore(
    key: str, query: dict[str, str], keys: Credentials, expires_s: int, kind: str | None
) -> None:
    method, headers = ("PUT", [("content-type", kind)]) if kind else ("GET", [])
    path, text = f"/{escape_path(key)}", canonical_query(query.items())
    url = f"https://{HOST}{path}" + (f"?{text}" if text else "")
    request = AWSRequest(method=method, url=url, headers=dict(headers))
    boto_keys = BotoCredentials(keys.access_key, keys.secret_key, keys.token)
    auth = botocore.auth.S3SigV4QueryAuth(boto_keys, "s3", "us-east-1", expires=expires_s)
    auth.add_auth(request)
    expected = dict(parse_qsl(urlsplit(request.url).query, keep_blank_values=True))

    scope = Scope("s3", "us-east-1", keys)
    presigned = presign_query(
        method,
        path,
        list(query.items()),
        [("host", HOST), *headers],
        scope=scope,
        now=NOW,
        expires_s=expires_s,
    )

    assert dict(parse_qsl(presigned, keep_blank_values=True)) == expected


def test_secret_keys_are_not_shown_by_repr() -> None:
    keys = Credentials("AKIA", "very-secret", "token")

    assert re.search("secret|token|AKIA", repr(Scope("s3", "us-east-1", keys))) is None
