"""Follows redirects, and decides what each further request may contain
(docs/engines.md, Gateways).

A redirect from https to http is followed, because many sites have such redirects. Each hop is
parsed, resolved and checked like the first URL. The caller's headers and body are sent only to the
origin that they were meant for: any of them may be a credential, and the client cannot know which.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import trio

from conveyor.domain.submit.target import BadUrl, Target, join, parse_url
from conveyor.http_client.errors import BadRedirect
from conveyor.http_client.exchange import Headers, Request, Response
from conveyor.http_client.pool import HttpPool

# A loop of redirects ends here. All hops share one deadline.
REDIRECTS_MAX = 5

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Headers that are sent to another origin too: a browser sends them to every site, so they contain
# no secret.
_PUBLIC = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})
# Hop-by-hop and framing headers. The HTTP client sets them; a caller's value could break the
# framing of the request.
_DROPPED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-language"})


class Followed(msgspec.Struct, frozen=True):
    """The last response of a chain of redirects, and the target that sent it."""

    response: Response
    target: Target


async def fetch_following(pool: HttpPool, request: Request) -> Followed:
    """Fetches, and follows each redirect whose body the request does not want.

    Raises BadRedirect and every error of the pool.
    """
    deadline = trio.current_time() + request.deadline_s
    for _ in range(REDIRECTS_MAX + 1):
        left_s = deadline - trio.current_time()
        response = await pool.fetch(msgspec.structs.replace(request, deadline_s=left_s))
        location = response.header(b"location")
        is_final = response.status not in _REDIRECTS or location is None
        if is_final or request.wants_body(response.status):
            return Followed(response, request.target)
        assert location is not None
        target = join(request.target, location)
        if isinstance(target, BadUrl):
            raise BadRedirect("the redirect leads to something that is not a web address")
        # `join` has parsed the address strictly, and the pool resolves and checks it before it
        # connects. So a redirect cannot reach an address that the first URL could not.
        request = next_request(request, target, response.status)
    raise BadRedirect(f"more than {REDIRECTS_MAX} redirects")


def next_request(request: Request, target: Target, status: int) -> Request:
    # As browsers do: 303 asks for a GET, and 301 and 302 turn a POST into one.
    is_read = request.method in {"GET", "HEAD"}
    keeps_method = is_read or (status != 303 and (status in {307, 308} or request.method != "POST"))
    body, headers = request.body, request.headers
    if not keeps_method:
        body = None
        headers = tuple(pair for pair in headers if pair[0].lower() not in _OF_THE_BODY)
    if target.origin != request.target.origin:
        # Sending the body would disclose it, and dropping it would send another request than the
        # caller's. So the fetch fails.
        if body:
            raise BadRedirect("the redirect would take the request's body to another origin")
        body, headers = None, public_headers(headers, request.target, target)
    return msgspec.structs.replace(
        request,
        method=request.method if keeps_method else "GET",
        target=target,
        headers=headers,
        body=body,
    )


def public_headers(headers: Headers, source: Target, target: Target) -> Headers:
    """Returns the headers that another origin may receive.

    Dropped headers do not return if a later redirect leads to the first origin again: the site in
    between chose the URL of that request.
    """
    allowed: list[tuple[str, str]] = []
    for name, value in headers:
        if name.lower() in _PUBLIC:
            allowed.append((name, value))
        elif name.lower() == "referer" and (target.is_tls or not source.is_tls):
            page = parse_url(value)
            if isinstance(page, Target) and (target.is_tls or not page.is_tls):
                # As browsers do: the origin of the page, without path and query.
                allowed.append((name, f"{page.scheme}://{page.authority}/"))
    return tuple(allowed)


def forwardable(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the caller's headers without those that would change the framing of the request."""
    return [
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in _DROPPED and not lower.startswith("proxy-")
    ]
