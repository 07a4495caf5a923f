"""Feeds: giving events their places, and reading them in order (SPEC.md 4.15)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from conveyor.domain import event_log
from conveyor.domain.changes import Applied, Change, EventKey, FeedKey
from conveyor.domain.event import Event
from conveyor.domain.ids import CallerId
from conveyor.domain.queries import EventsOf, UnplacedEvents
from conveyor.ports.errors import Unavailable
from conveyor.ports.store import Store

_TRIES = 20
_PLACED_MAX = 45  # With what leads to each of them, one transaction of any engine.
_TRIM_EVERY = 500


@dataclass(slots=True, eq=False)
class EventWakeups:
    """Wakes readers of a feed in this very process; others look for themselves."""

    streams_count: int = 0
    _tickets: dict[CallerId, trio.Event] = field(default_factory=dict)

    def ticket(self, caller: CallerId) -> trio.Event:
        """Set when something comes after now: taken before one reads, it misses nothing."""
        return self._tickets.setdefault(caller, trio.Event())

    def tell(self, caller: CallerId) -> None:
        ticket = self._tickets.pop(caller, None)
        if ticket is not None:
            ticket.set()


async def number_committed(store: Store, news: EventWakeups, change: Change) -> None:
    """Places what an applied change has told of. The sweeper brings what is left behind."""
    events = event_log.events_in(change)
    if events:
        with suppress(Unavailable):
            await _place(store, news, events)


async def number_orphans(store: Store, news: EventWakeups, *, before: float) -> int:
    """Places events that were committed and then left behind; answers how many."""
    left = await store.find(UnplacedEvents(before=before, limit=_PLACED_MAX))
    by_caller: dict[CallerId, list[Event]] = defaultdict(list)
    for event in left:
        by_caller[event.caller].append(event)
    for events in by_caller.values():
        await _place(store, news, events)
    return len(left)


async def _place(store: Store, news: EventWakeups, events: Sequence[Event]) -> None:
    caller = events[0].caller
    for _ in range(_TRIES):
        row = await store.read(FeedKey(caller))
        (verdict,) = await store.commit((event_log.assign_sequence(row, events),))
        if isinstance(verdict, Applied):
            news.tell(caller)
            await _trim(store, caller, (row.seq if row else 0) + len(events), len(events))
            return
        events = await _still_unplaced(store, events)
        if not events:
            return


async def _still_unplaced(store: Store, events: Sequence[Event]) -> list[Event]:
    """Somebody else may have placed, or removed, some of them."""
    rows = [await store.read(EventKey(event.caller, event.event_id)) for event in events]
    return [row for row in rows if row is not None and row.seq == 0]


async def _trim(store: Store, caller: CallerId, seq: int, placed: int) -> None:
    """Now and then the oldest go, if there are too many."""
    if seq // _TRIM_EVERY == (seq - placed) // _TRIM_EVERY:
        return
    oldest = await store.find(EventsOf(caller=caller, after=0, limit=2 * _TRIM_EVERY))
    gone = event_log.trim(oldest, seq)
    if gone:
        await store.commit(gone)


async def page(store: Store, caller: CallerId, *, after: int, limit: int) -> list[Event]:
    """The caller's events behind a place, oldest first."""
    return await store.find(EventsOf(caller=caller, after=after, limit=limit))


async def newest(store: Store, caller: CallerId) -> int:
    """The place of the newest event; 0 when there never was one."""
    row = await store.read(FeedKey(caller))
    return 0 if row is None else row.seq
