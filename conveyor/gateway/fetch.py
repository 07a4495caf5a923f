"""Fetches a page without a browser (docs/gateway.md, Answers)."""

from __future__ import annotations

import trio

from conveyor import USER_AGENT
from conveyor.domain import limits
from conveyor.gateway.call import Call
from conveyor.gateway.errors import failure_from
from conveyor.gateway.page import Page
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool, fetch_following, forwardable
from conveyor.http_client.response_body import ACCEPT_ENCODING

_REDIRECTS = range(300, 400)


async def fetch_plain(pool: HttpPool, call: Call, deadline: float) -> Page:
    """Returns the page with any status. Raises CallFailed if there is no response."""
    try:
        followed = await fetch_following(
            pool,
            Request(
                method=call.method,
                target=call.target,
                partition=call.partition,
                headers=_headers_for(call),
                body=call.body,
                deadline_s=deadline - trio.current_time(),
                body_bytes_max=limits.BODY_BYTES_MAX,
                wants_body=lambda status: status not in _REDIRECTS or status in call.allowed,
            ),
        )
    except FetchFailed as error:
        raise failure_from(error) from error
    response = followed.response
    return Page(
        url=followed.target.url,
        status=response.status,
        headers=tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers
        ),
        body=response.body,
    )


def _headers_for(call: Call) -> tuple[tuple[str, str], ...]:
    custom = forwardable(call.headers)
    named = {name.lower() for name, _ in custom}
    defaults = [
        ("User-Agent", USER_AGENT),
        ("Accept", "*/*"),
        ("Accept-Encoding", ACCEPT_ENCODING),
    ]
    if call.body_content_type is not None:
        defaults.append(("Content-Type", call.body_content_type))
    return (*(pair for pair in defaults if pair[0].lower() not in named), *custom)
