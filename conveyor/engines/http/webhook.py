"""WebhookNotifier: posts one notice to a customer's receiver (SPEC 6.6).

Guarded like any fetch: one resolution, checked addresses, no redirect, 15 seconds in all and at
most 64 KiB of the answer, none of which is kept. Unsigned for now.
"""

from __future__ import annotations

from collections.abc import Callable

from conveyor.domain import limits
from conveyor.domain.model import Notice, Webhook
from conveyor.domain.urls import BadUrl, Target, parse_url
from conveyor.engines.http.direct import USER_AGENT
from conveyor.engines.http.retry_after import parse_retry_after
from conveyor.net.errors import FetchFailed, TimedOut
from conveyor.net.message import Request, Response
from conveyor.net.pool import HttpPool
from conveyor.ports.notifier import Delivered, NotDelivered

RETRY_AFTER_S_MAX = 24 * 3600.0


class WebhookNotifier:
    def __init__(self, pool: HttpPool, *, now: Callable[[], float]) -> None:
        self._pool = pool
        self._now = now

    async def deliver(self, notice: Notice, webhook: Webhook) -> Delivered | NotDelivered:
        target = parse_url(webhook.url)
        if isinstance(target, BadUrl):
            return NotDelivered(f"transport_error:{target.reason.value}")
        if not (target.is_tls or self._pool.policy.allow_private):
            return NotDelivered("transport_error:https is required")
        try:
            return self._judge(await self._pool.fetch(_request_for(notice, target)))
        except TimedOut:
            return NotDelivered("timeout")
        except FetchFailed as error:
            return NotDelivered(f"transport_error:{error.detail}")

    def _judge(self, response: Response) -> Delivered | NotDelivered:
        status = response.status
        if 200 <= status < 300:
            return Delivered(status)
        retry_after_s = parse_retry_after(
            response.header(b"retry-after"), now=self._now(), seconds_max=RETRY_AFTER_S_MAX
        )
        return NotDelivered(
            f"http_{status // 100}xx:{status}", status, retry_after_s, gone=status == 410
        )


def _request_for(notice: Notice, target: Target) -> Request:
    return Request(
        method="POST",
        target=target,
        headers=(
            ("User-Agent", USER_AGENT),
            ("Accept", "*/*"),
            ("Content-Type", "application/json"),
            ("X-ZenRows-Event-Id", notice.notice_id),
        ),
        body=notice.payload.encode(),
        deadline_s=limits.WEBHOOK_TIMEOUT_S,
        wants_body=_wants_no_body,
    )


def _wants_no_body(_status: int) -> bool:
    return False
