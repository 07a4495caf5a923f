"""AWS Signature Version 4 for headers and presigned URLs (docs/engines.md, AWS client).

Callers pass paths escaped as on the wire (`escape_path`), because S3 signs the path as it is sent.
Other services sign a path that is escaped twice. They have only the path `/`, which escaping does
not change, so one rule is enough.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote

import msgspec

UNSIGNED = "UNSIGNED-PAYLOAD"
PRESIGN_S_MAX = 7 * 24 * 3600  # S3 refuses longer ones.

_ALGORITHM = "AWS4-HMAC-SHA256"

Pairs = Sequence[tuple[str, str]]


class Credentials(msgspec.Struct, frozen=True):
    access_key: str
    secret_key: str
    token: str | None = None
    expires_at: float | None = None

    def __repr__(self) -> str:
        return "Credentials(***)"


class Scope(msgspec.Struct, frozen=True):
    """The service, the region and the credentials of a signature."""

    service: str
    region: str
    credentials: Credentials


def stamp(now: float) -> str:
    return _stamp(int(now))


# Many calls are signed within the same second, and `strftime` is slow.
@lru_cache(maxsize=16)
def _stamp(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y%m%dT%H%M%SZ")


def escape_path(key: str) -> str:
    return quote(key, safe="/~")


def canonical_query(pairs: Iterable[tuple[str, str]]) -> str:
    escaped = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in pairs)
    return "&".join(f"{name}={value}" for name, value in escaped)


def payload_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def authorization(
    method: str, path: str, query: str, headers: Pairs, payload: str, scope: Scope
) -> str:
    """Returns the Authorization header.

    All `headers` are signed. Their names must be lower-case and include `host` and `x-amz-date`.
    `query` comes from `canonical_query`.
    """
    headers = sorted(headers)
    at = next(value for name, value in headers if name == "x-amz-date")
    names = ";".join([name for name, _ in headers])
    lines = "".join([f"{name}:{' '.join(value.split())}\n" for name, value in headers])
    request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
    signature = _signature(request, scope, at)
    credential = f"{scope.credentials.access_key}/{_credential_scope(scope, at)}"
    return f"{_ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"


def presign_query(
    method: str,
    path: str,
    query: Pairs,
    headers: Pairs,
    *,
    scope: Scope,
    now: float,
    expires_s: int,
) -> str:
    """Returns the query string that permits this request, without credentials, until it expires.

    The request must carry all `headers`. Their names must be lower-case and include `host`.
    """
    assert 0 < expires_s <= PRESIGN_S_MAX
    at = stamp(now)
    headers = sorted(headers)
    names = ";".join([name for name, _ in headers])
    pairs = [
        *query,
        ("X-Amz-Algorithm", _ALGORITHM),
        ("X-Amz-Credential", f"{scope.credentials.access_key}/{_credential_scope(scope, at)}"),
        ("X-Amz-Date", at),
        ("X-Amz-Expires", str(expires_s)),
        ("X-Amz-SignedHeaders", names),
    ]
    if scope.credentials.token:
        pairs.append(("X-Amz-Security-Token", scope.credentials.token))
    text = canonical_query(pairs)
    lines = "".join([f"{name}:{value}\n" for name, value in headers])
    request = f"{method}\n{path}\n{text}\n{lines}\n{names}\n{UNSIGNED}"
    return f"{text}&X-Amz-Signature={_signature(request, scope, at)}"


def _signature(request: str, scope: Scope, at: str) -> str:
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{at}\n{_credential_scope(scope, at)}\n{digest}"
    key = _signing_key(scope.credentials.secret_key, at[:8], scope.region, scope.service)
    return hmac.digest(key, text.encode(), "sha256").hex()


def _credential_scope(scope: Scope, at: str) -> str:
    return f"{at[:8]}/{scope.region}/{scope.service}/aws4_request"


# The key changes once a day per region and service. The cache saves four HMACs per call.
@lru_cache(maxsize=64)
def _signing_key(secret: str, day: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
