"""CompletionNotifier: delivers what the outbox holds, however long it takes (SPEC 6.6).

Owns:    the deliveries under way.
Hears:   nothing: the outbox is the queue, and is asked when something may be due.
Says:    nothing.
Crashes: only by bug. A notice that was delivered but not recorded goes out again, same id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from conveyor.domain.ids import NoticeId
from conveyor.domain.model import Notice
from conveyor.ports.errors import Unavailable
from conveyor.ports.notifier import Notifier
from conveyor.usecases import notices
from conveyor.usecases.env import Env

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionNotifier:
    env: Env
    notifier: Notifier
    period_s: float = 1.0
    at_once_max: int = 16

    async def run(self) -> None:
        under_way: set[NoticeId] = set()
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    for notice in await notices.due(self.env, limit=100):
                        if notice.notice_id in under_way or len(under_way) >= self.at_once_max:
                            continue
                        under_way.add(notice.notice_id)
                        nursery.start_soon(self._deliver, notice, under_way)
                except Unavailable as error:
                    log.warning("outbox not read", extra={"cause": str(error)})
                await trio.sleep(self.period_s)

    async def _deliver(self, notice: Notice, under_way: set[NoticeId]) -> None:
        try:
            await notices.deliver(self.env, self.notifier, notice)
        except Unavailable as error:
            log.warning("delivery not recorded", extra={"cause": str(error)})
        finally:
            under_way.discard(notice.notice_id)
