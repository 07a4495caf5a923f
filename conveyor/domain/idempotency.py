"""Classifies a request with an Idempotency-Key: first, repeated, in progress, or misused
(SPEC.md 4.2)."""

from __future__ import annotations

import hashlib

import msgspec

from conveyor.domain import limits, timing
from conveyor.domain.changes import Change, Guard, Insert, RecordKey, Update
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import CallerId
from conveyor.domain.model import IdempotencyRecord


class Request(msgspec.Struct, frozen=True):
    """One request with a key: its caller, method, path and fingerprint."""

    caller: CallerId
    method: str
    path: str
    key: str
    fingerprint: str

    @property
    def key_id(self) -> str:
        """The id of the record. It includes the caller, so that no caller gets another's
        response.
        """
        scope = "\n".join((self.caller, self.method, self.path, self.key))
        return hashlib.sha256(scope.encode()).hexdigest()


class First(msgspec.Struct, frozen=True):
    """No request came before, or its process is gone. Execute the request, as `subject`."""


class Replay(msgspec.Struct, frozen=True):
    """Return this stored response."""

    status: int
    body: str


class InProgress(msgspec.Struct, frozen=True):
    """Another request executes it. The caller may retry after this time."""

    retry_after_s: float


class KeyReusedWithOtherRequest(msgspec.Struct, frozen=True):
    """The key was used with another request."""


KeyVerdict = First | Replay | InProgress | KeyReusedWithOtherRequest


def check_key(key: str) -> str:
    """A key is 1 to 128 printable ASCII characters."""
    if not 0 < len(key) <= limits.IDEMPOTENCY_KEY_CHARS_MAX or not (
        key.isascii() and key.isprintable()
    ):
        raise InvalidArgument(
            "Idempotency-Key must be 1 to "
            f"{limits.IDEMPOTENCY_KEY_CHARS_MAX} printable ASCII characters.",
            code="invalid_idempotency_key",
        )
    return key


def fingerprint(body: bytes, query: bytes = b"") -> str:
    return hashlib.sha256(query + b"\n" + body).hexdigest()


class Fingerprint:
    """The fingerprint of a body that arrives in pieces."""

    def __init__(self, query: bytes) -> None:
        self._digest = hashlib.sha256(query + b"\n")

    def update(self, piece: bytes) -> None:
        self._digest.update(piece)

    def __str__(self) -> str:
        return self._digest.hexdigest()


def decide(record: IdempotencyRecord | None, request: Request, *, now: float) -> KeyVerdict:
    """Classifies a request. An expired record counts as absent, even if it is not removed yet.

    Both times are compared as in the guards of the store: they are over only if they are before
    `now`.
    """
    if record is None or record.expires_at < now:
        return First()
    if record.fingerprint != request.fingerprint:
        return KeyReusedWithOtherRequest()
    if record.response_status is not None and record.response_body is not None:
        return Replay(record.response_status, record.response_body)
    if record.claimed_until >= now and not _is_unreal(record, now):
        return InProgress(min(record.claimed_until - now, limits.IDEMPOTENCY_RETRY_S))
    return First()


def claim_key(
    request: Request, record: IdempotencyRecord | None, *, subject: str, owner: str, now: float
) -> Change:
    """Claims a key, or takes it over from a lost process and keeps its subject."""
    key = RecordKey(request.key_id)
    until = now + limits.IDEMPOTENCY_CLAIM_S
    if record is not None and record.expires_at >= now:
        as_seen = (("fingerprint", request.fingerprint), ("response_status", None))
        guard = Guard(equals=as_seen, lapsed=("claimed_until", now))
        if _is_unreal(record, now):
            guard = Guard(equals=(*as_seen, ("claimed_until", record.claimed_until)))
        return Change((Update(key, guard, {"owner": owner, "claimed_until": until}),))
    fresh = IdempotencyRecord(
        key_id=request.key_id,
        caller=request.caller,
        fingerprint=request.fingerprint,
        subject=subject,
        owner=owner,
        claimed_until=until,
        expires_at=now + limits.IDEMPOTENCY_TTL_S,
    )
    return Change((Insert(key, fresh, over_expired_at=now),))


def _is_unreal(record: IdempotencyRecord, now: float) -> bool:
    """Whether its claim was made by a clock that was ahead of the current one."""
    return timing.is_unreal(record.claimed_until, now=now, ttl_s=limits.IDEMPOTENCY_CLAIM_S)


def answer(request: Request, status: int, body: str) -> Change:
    """Stores the response. The first stored response is final."""
    guard = Guard(equals=(("fingerprint", request.fingerprint), ("response_status", None)))
    values = {"response_status": status, "response_body": body, "claimed_until": 0.0}
    return Change((Update(RecordKey(request.key_id), guard, values),))


def release(claimed: IdempotencyRecord) -> Change:
    """Releases a claim without a final response, so that the next request can start at once."""
    guard = Guard(
        equals=(
            ("owner", claimed.owner),
            ("claimed_until", claimed.claimed_until),
            ("response_status", None),
        )
    )
    return Change((Update(RecordKey(claimed.key_id), guard, {"claimed_until": 0.0}),))
