"""The event log over HTTP: pages to poll, or a stream of server-sent events (SPEC.md 4.15)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import trio

from conveyor.api.route import Example, Parameter, Query, Route
from conveyor.api.server.quota import Held
from conveyor.api.server.request import Download, RequestContext, Response, json_reply
from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import Event
from conveyor.ports.errors import Unavailable
from conveyor.schemas.responses import ListEventsResponse
from conveyor.schemas.views import event_view
from conveyor.usecases import event_log

STREAM = "text/event-stream"
LATEST = "latest"
# A stream is woken by events of its own process only. It polls for events of other processes at
# this interval. The reads of all streams of a process are bounded: with more than POLLS_PER_S_MAX
# streams, each one polls less often.
POLL_S = 1.0
POLLS_PER_S_MAX = 50
# Any number of so many digits fits into 64 bits.
POSITION_DIGITS_MAX = 15


async def list_events(call: RequestContext) -> Response | Download:
    limit = call.limit(default=limits.EVENT_ROWS, limit_max=limits.EVENT_ROWS_MAX)
    if STREAM in call.headers.get("accept", ""):
        position = call.headers.get("last-event-id") or call.parameter("after")
        headers = {"Content-Type": STREAM, "X-Accel-Buffering": "no"}
        after = await _position_of(call, position)
        held = call.api.requests.hold_stream(call.caller, call.address)
        return Download(_stream(call, after, held), headers, timeout_s=None)
    after = await _position_of(call, call.parameter("after"))
    rows = await event_log.page(call.env.store, call.caller, after=after, limit=limit)
    last = rows[-1].seq if rows else after
    return json_reply(ListEventsResponse([event_view(row) for row in rows], str(last)))


async def _position_of(call: RequestContext, position: str | None) -> int:
    if position is None:
        return 0
    if position == LATEST:
        return await event_log.newest(call.env.store, call.caller)
    if not (position.isascii() and position.isdigit() and len(position) <= POSITION_DIGITS_MAX):
        raise InvalidArgument(
            "after must be the id of an event, or latest for new events only.",
            pointer="/after",
        )
    return int(position)


async def _stream(call: RequestContext, after: int, held: Held) -> AsyncGenerator[bytes, None]:
    """Yields every event after `after`, then each new event, until the server stops."""
    news = call.env.news
    news.streams_count += 1
    try:
        async with aclosing(_pieces(call, after)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        news.streams_count -= 1
        held.release()


async def _pieces(call: RequestContext, after: int) -> AsyncGenerator[bytes, None]:
    yield b"retry: 2000\n\n"
    silent_since = trio.current_time()
    while call.api.is_ready():
        # Take the ticket before the read, so that an event during the read ends the wait below.
        news = call.env.news.ticket(call.caller)
        rows = await _poll(call, after)
        for row in rows:
            yield _frame(row)
            after = row.seq
        if rows:
            silent_since = trio.current_time()
            continue
        with trio.move_on_after(_poll_interval_s(call)):
            await news.wait()
        if trio.current_time() - silent_since >= limits.EVENT_HEARTBEAT_S:
            silent_since = trio.current_time()
            yield b": still here\n\n"


def _poll_interval_s(call: RequestContext) -> float:
    """The poll interval of one stream: never longer than the interval of the heartbeats."""
    shared_s = call.env.news.streams_count / POLLS_PER_S_MAX
    return min(max(POLL_S, shared_s), limits.EVENT_HEARTBEAT_S)


async def _poll(call: RequestContext, after: int) -> list[Event]:
    try:
        return await event_log.page(
            call.env.store, call.caller, after=after, limit=limits.EVENT_ROWS
        )
    except Unavailable:
        return []  # The next poll reads from the same position, so no event is skipped.


def _frame(row: Event) -> bytes:
    body = msgspec.json.encode(event_view(row)).decode()
    return f"id: {row.seq}\nevent: {row.event_type}\ndata: {body}\n\n".encode()


AFTER = Parameter(
    "after",
    {"type": "string"},
    "Only events after this one, or `latest` for new events only.",
)
EVENTS = Parameter(
    "limit",
    {
        "type": "integer",
        "minimum": 1,
        "maximum": limits.EVENT_ROWS_MAX,
        "default": limits.EVENT_ROWS,
    },
    "The largest number of rows in the response.",
)

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/events",
        name="listEvents",
        tag="events",
        summary="List the events of your jobs in order; a stream with `Accept: text/event-stream`",
        description=(
            "Returns a page of the caller's event log after a position. With `Accept: text/event-"
            "stream` the response is a stream of server-sent events with the same ids."
        ),
        example=Example(query={"limit": "10"}),
        does=Query(list_events),
        answers={200: ListEventsResponse},
        query=(AFTER, EVENTS),
    ),
)
