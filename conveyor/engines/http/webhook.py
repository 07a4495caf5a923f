"""WebhookNotifier: posts one notice to a customer's receiver (SPEC.md 4.16).

A delivery has the guards of a fetch: one name resolution, checked addresses, no redirect, 15
seconds in all. It reads at most 64 KiB of the answer and keeps none of it. Each try is signed with
its own time.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from conveyor import USER_AGENT
from conveyor.domain import limits
from conveyor.domain.model import Webhook
from conveyor.domain.submit.target import BadUrl, Target, parse_url
from conveyor.domain.webhook import RETRY_AFTER_S_MAX, signature_headers
from conveyor.engines.http.failure_mapping import parse_retry_after
from conveyor.http_client.errors import FetchFailed, NameNotResolved, OutOfResources, TimedOut
from conveyor.http_client.exchange import Request, Response
from conveyor.http_client.pool import HttpPool
from conveyor.ports.errors import Unavailable
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, Unresolved


class WebhookNotifier:
    def __init__(
        self,
        pool: HttpPool,
        *,
        now: Callable[[], float],
        timeout_s: float = limits.WEBHOOK_TIMEOUT_S,
    ) -> None:
        self._pool = pool
        self._now = now
        self._timeout_s = timeout_s

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        target = parse_url(message.webhook.url)
        if isinstance(target, BadUrl):
            return NotDelivered(f"transport_error:{target.reason.value}")
        # Plain http is accepted only where private targets are, as in development.
        if not (target.is_tls or self._pool.policy.allow_private):
            return NotDelivered("transport_error:https is required")
        try:
            return self._judge(await self._pool.fetch(self._request_for(message, target)))
        except OutOfResources as error:
            # No try was made, so none is counted. The notice is due again when its claim lapses.
            raise Unavailable(error.detail) from error
        except TimedOut:
            return NotDelivered("timeout")
        except FetchFailed as error:
            return NotDelivered(f"transport_error:{error.detail}")

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        target = parse_url(webhook.url)
        if isinstance(target, BadUrl):
            return Unresolved(is_temporary=False)
        try:
            with trio.fail_after(limits.WEBHOOK_LOOKUP_S):
                await self._pool.resolve(target, partition)
        except trio.TooSlowError:
            return Unresolved(is_temporary=True)
        except FetchFailed as error:
            is_temporary = isinstance(error, NameNotResolved) and error.is_temporary
            is_ours = isinstance(error, OutOfResources)
            return Unresolved(is_temporary=is_temporary or is_ours)
        return None

    def _request_for(self, message: Message, target: Target) -> Request:
        body = message.payload.encode()
        return Request(
            method="POST",
            target=target,
            partition=message.partition,
            headers=(
                ("User-Agent", USER_AGENT),
                ("Accept", "*/*"),
                ("Content-Type", "application/json"),
                ("X-ZenRows-Event-Id", message.event_id),
                *signature_headers(message.event_id, body, message.secrets, now=self._now()),
            ),
            body=body,
            deadline_s=self._timeout_s,
            # Only the status counts. The body of the receiver is not kept.
            wants_body=_wants_no_body,
        )

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


def _wants_no_body(_status: int) -> bool:
    return False
