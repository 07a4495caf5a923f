"""Event log: numbers the events of a caller, and reads them in order (SPEC.md 4.15).

Readers go by the number only. An event that is numbered late comes after everything that was read
before, so no reader misses it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import trio

from conveyor.domain import event_log
from conveyor.domain.changes import Applied, Change, EventKey, FeedKey
from conveyor.domain.ids import CallerId
from conveyor.domain.model import Event, EventType
from conveyor.domain.queries import EventsOf, UnplacedEvents
from conveyor.ports.errors import Unavailable
from conveyor.ports.store import Store

log = logging.getLogger(__name__)

# Other processes number events of the same caller, and each lost race costs one try. The sweeper
# numbers what is left after the last one.
_TRIES = 20
# With its index entry, each event is two items of a transaction. A transaction of any engine has
# room for this many events and the row that numbers them.
_PLACED_MAX = 45
# Old events are removed once per this many new ones, so that most events cost no extra read.
_TRIM_EVERY = 500
_LOGGED_COUNTS = ("total", "successful", "failed")


@dataclass(slots=True, eq=False)
class EventWakeups:
    """Wakes readers of an event log in this process. Readers in other processes poll."""

    streams_count: int = 0
    _tickets: dict[CallerId, trio.Event] = field(default_factory=dict)

    def ticket(self, caller: CallerId) -> trio.Event:
        """Returns an event that is set by the next new entry. A reader that takes it before it
        reads misses nothing."""
        return self._tickets.setdefault(caller, trio.Event())

    def tell(self, caller: CallerId) -> None:
        ticket = self._tickets.pop(caller, None)
        if ticket is not None:
            ticket.set()


async def number_committed(store: Store, news: EventWakeups, change: Change) -> None:
    """Numbers the events of an applied change. The sweeper numbers those that are left."""
    events = event_log.events_in(change)
    for event in events:
        _log_event(event)
    if events:
        # The change is already applied. An error here would make the caller repeat it.
        with suppress(Unavailable):
            await _number_events(store, news, events)


def _log_event(event: Event) -> None:
    """One line for each step in the life of a run, in the process that committed it."""
    data = msgspec.json.decode(event.data)
    fields = {"job": event.job_id, "run": event.run_id}
    # Why it ended, and what became of its tasks.
    fields |= {name: data[name] for name in ("stop_reason", "failure_reason") if name in data}
    fields |= {name: data["stats"][name] for name in _LOGGED_COUNTS if "stats" in data}
    match event.event_type:
        case EventType.RUN_CREATED:
            log.info("run started", extra=fields)
        case EventType.RUN_PAUSED:
            log.info("run paused", extra=fields)
        case EventType.RUN_RESUMED:
            log.info("run resumed", extra=fields)
        case EventType.RUN_COMPLETED:
            log.info("run completed", extra=fields)
        case EventType.RUN_STOPPED:
            log.info("run stopped", extra=fields)
        case EventType.RUN_FAILED:
            log.warning("run failed", extra=fields)
        case EventType.RUN_DELETED:
            log.info("run deleted", extra={**fields, "run": data["run_id"]})
        case EventType.JOB_DELETED:
            log.info("job deleted", extra={"job": data["job_id"]})
        case _:
            log.debug("event", extra={**fields, "type": event.event_type})


async def number_orphans(store: Store, news: EventWakeups, *, before: float) -> int:
    """Numbers events that were committed but not numbered. Returns how many were found."""
    left = await store.find(UnplacedEvents(before=before, limit=_PLACED_MAX))
    by_caller: dict[CallerId, list[Event]] = defaultdict(list)
    for event in left:
        by_caller[event.caller].append(event)
    for events in by_caller.values():
        await _number_events(store, news, events)
    return len(left)


async def _number_events(store: Store, news: EventWakeups, events: Sequence[Event]) -> None:
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
    """Returns the events that no other process has numbered or removed."""
    rows = [await store.read(EventKey(event.caller, event.event_id)) for event in events]
    return [row for row in rows if row is not None and row.seq == 0]


async def _trim(store: Store, caller: CallerId, seq: int, placed: int) -> None:
    """Removes the oldest events if there are too many."""
    # True unless the new numbers crossed a multiple of _TRIM_EVERY.
    if seq // _TRIM_EVERY == (seq - placed) // _TRIM_EVERY:
        return
    # Twice as many as are added per trim, so that a backlog shrinks.
    oldest = await store.find(EventsOf(caller=caller, after=0, limit=2 * _TRIM_EVERY))
    gone = event_log.trim(oldest, seq)
    if gone:
        await store.commit(gone)


async def page(store: Store, caller: CallerId, *, after: int, limit: int) -> list[Event]:
    """Returns the caller's events after a number, oldest first."""
    return await store.find(EventsOf(caller=caller, after=after, limit=limit))


async def newest(store: Store, caller: CallerId) -> int:
    """Returns the number of the newest event; 0 if there never was one."""
    row = await store.read(FeedKey(caller))
    return 0 if row is None else row.seq
