"""CompletionNotifier: delivers what the outbox holds, however long it takes (SPEC.md 4.16).

Owns:    the deliveries under way, and what is known of the receivers.
Hears:   nothing: the outbox is the queue, and is asked when something may be due.
Says:    nothing.
Crashes: only by bug. A notice that was delivered but not recorded goes out again, same id. What
         was known of receivers is learned anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.lanes import Lanes
from conveyor.domain.ids import NoticeId
from conveyor.domain.model import Notice
from conveyor.ports.errors import Unavailable
from conveyor.ports.notifier import Notifier
from conveyor.usecases import notices
from conveyor.usecases.env import Env
from conveyor.usecases.isolation import Crash, isolate
from conveyor.usecases.notices import Postponed, Ready

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Desk:
    """What one incarnation has at hand."""

    lanes: Lanes
    under_way: set[NoticeId] = field(default_factory=set)
    room_made: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionNotifier:
    env: Env
    notifier: Notifier
    period_s: float = 1.0
    page_max: int = 100
    at_once_max: int = 64
    per_caller_max: int = 16
    per_receiver_max: int = 4

    async def run(self) -> None:
        desk = _Desk(
            Lanes(
                at_once_max=self.at_once_max,
                per_caller_max=self.per_caller_max,
                per_receiver_max=self.per_receiver_max,
            )
        )
        async with trio.open_nursery() as nursery:
            while True:
                desk.room_made = trio.Event()
                try:
                    made_way = await self._start_due(desk, nursery)
                except Unavailable as error:
                    log.warning("outbox not read", extra={"cause": str(error)})
                    made_way = False
                with trio.move_on_after(0 if made_way else self.period_s):
                    await desk.room_made.wait()

    async def _start_due(self, desk: _Desk, nursery: trio.Nursery) -> bool:
        """Starts whatever has its turn. What cannot go makes way for others, which would not be
        seen behind a full page; answers whether some did."""
        page = await notices.due(self.env, limit=self.page_max)
        is_crowded = len(page) == self.page_max
        postponed: list[Postponed] = []
        for notice in page:
            if desk.lanes.is_full:
                break
            if notice.notice_id in desk.under_way:
                continue
            ready = await self._prepare(notice)
            if ready is None:
                continue
            later = desk.lanes.enter(ready.job.caller, ready.receiver, now=self.env.now())
            if later is None:
                desk.under_way.add(notice.notice_id)
                nursery.start_soon(self._deliver, ready, desk)
            elif later.is_sidelined or is_crowded:
                postponed.append(Postponed(notice, later.at, later.is_sidelined))
        await notices.postpone(self.env, postponed)
        return is_crowded and bool(postponed)

    async def _prepare(self, notice: Notice) -> Ready | None:
        fields = {"event": notice.notice_id}
        ready = await isolate(partial(notices.prepare, self.env, notice), "a notice", extra=fields)
        if isinstance(ready, Crash):
            await notices.fail_crashed(self.env, notice)
            return None
        return ready

    async def _deliver(self, ready: Ready, desk: _Desk) -> None:
        outcome = None
        fields = {"event": ready.notice.notice_id}
        try:
            deliver = partial(notices.deliver, self.env, self.notifier, ready)
            done = await isolate(deliver, "a notice", extra=fields)
            if isinstance(done, Crash):
                await notices.fail_crashed(self.env, ready.notice)
            else:
                outcome = done
        except Unavailable as error:
            log.warning("delivery not recorded", extra={"cause": str(error)})
        finally:
            desk.under_way.discard(ready.notice.notice_id)
            desk.lanes.leave(ready.job.caller, ready.receiver, outcome, now=self.env.now())
            desk.room_made.set()
