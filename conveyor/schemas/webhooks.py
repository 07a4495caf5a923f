"""Responses about webhooks, signing keys and deliveries (docs/api.md, Webhooks).

Only the response to a rotation contains a secret.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated

import msgspec
from msgspec import Meta

from conveyor.domain.lifecycle import NOTICE, sources
from conveyor.domain.model import (
    DeliveryAttempt,
    Notice,
    NoticeChannel,
    NoticeStatus,
    SigningKey,
    SigningKeys,
)
from conveyor.schemas.responses import Count, Instant, Ulid
from conveyor.schemas.views import instant


class HmacKeyMeta(msgspec.Struct, frozen=True):
    """A signing key without its secret."""

    kid: Ulid
    created_at: Instant


class HmacKeyList(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signing keys: the active one, and the candidate of a rotation in progress."""

    active: HmacKeyMeta | None = None
    candidate: HmacKeyMeta | None = None


class HmacKeyCreated(msgspec.Struct, frozen=True):
    kid: Ulid
    secret: Annotated[str, Meta(description="32 bytes in base64; shown this once.")]
    created_at: Instant


class HmacKeyFinalized(msgspec.Struct, frozen=True):
    active_kid: Ulid
    created_at: Instant


class WebhookTestResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a test event."""

    delivered: bool
    event_id: Ulid
    elapsed_ms: Count
    status_code: int | None = None
    error: str | None = None


class DeliveryTry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One delivery attempt. The response body of the receiver is not stored."""

    at: Instant
    elapsed_ms: Count
    status_code: int | None = None
    error: str | None = None


class DeliveryResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event and the state of its delivery. `tries` has the latest attempts."""

    event_id: str
    event_type: str
    run_id: Ulid
    status: NoticeStatus
    occurred_at: Instant
    attempts: Count
    tries: list[DeliveryTry]
    next_try_at: Instant | None = None
    last_error: str | None = None
    channel: NoticeChannel = NoticeChannel.WEBHOOK


class ListDeliveriesResponse(msgspec.Struct, frozen=True):
    deliveries: list[DeliveryResponse]
    next_cursor: str | None


def keys_view(keys: SigningKeys | None) -> HmacKeyList:
    if keys is None:
        return HmacKeyList()
    candidate = None if keys.candidate is None else _meta(keys.candidate)
    return HmacKeyList(_meta(keys.active), candidate)


def created_view(key: SigningKey, secret: bytes) -> HmacKeyCreated:
    return HmacKeyCreated(key.kid, b64encode(secret).decode(), instant(key.created_at))


def finalized_view(key: SigningKey) -> HmacKeyFinalized:
    return HmacKeyFinalized(key.kid, instant(key.created_at))


def delivery_view(notice: Notice) -> DeliveryResponse:
    is_waiting = notice.status in sources(NOTICE, "delivered")
    return DeliveryResponse(
        event_id=notice.notice_id,
        event_type=notice.event_type,
        run_id=notice.run_id,
        status=notice.status,
        occurred_at=instant(notice.occurred_at),
        attempts=notice.attempts,
        tries=[_try_view(each) for each in notice.tries],
        next_try_at=instant(notice.due_at) if is_waiting else None,
        last_error=notice.last_error,
        channel=notice.channel,
    )


def milliseconds(duration_s: float) -> int:
    return round(duration_s * 1000)


def _meta(key: SigningKey) -> HmacKeyMeta:
    return HmacKeyMeta(key.kid, instant(key.created_at))


def _try_view(each: DeliveryAttempt) -> DeliveryTry:
    return DeliveryTry(
        at=instant(each.at),
        elapsed_ms=milliseconds(each.duration_s),
        status_code=each.status,
        error=each.error,
    )
