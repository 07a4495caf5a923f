"""Exporter: makes the files that were asked for, and removes them in time (SPEC 5.7).

Owns:    the exports under way, a few at a time.
Hears:   nothing: the rows are the queue, and are asked when something may be due.
Says:    nothing.
Crashes: only by bug. An export that was cut off is due again and is begun anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from conveyor.domain.export import Export
from conveyor.domain.ids import ExportId
from conveyor.ports.errors import Unavailable
from conveyor.usecases import exports
from conveyor.usecases.env import Env

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    env: Env
    period_s: float = 0.5
    at_once_max: int = 2

    async def run(self) -> None:
        under_way: set[ExportId] = set()
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    for export in await exports.due(self.env, limit=100):
                        if export.export_id in under_way or len(under_way) >= self.at_once_max:
                            continue
                        under_way.add(export.export_id)
                        nursery.start_soon(self._see_to, export, under_way)
                except Unavailable as error:
                    log.warning("exports not read", extra={"cause": str(error)})
                await trio.sleep(self.period_s)

    async def _see_to(self, export: Export, under_way: set[ExportId]) -> None:
        extra = {"run": export.run_id, "export": export.export_id}
        try:
            outcome = await exports.see_to(self.env, export)
            log.info("export seen to", extra={**extra, "outcome": outcome.value})
        except Unavailable as error:
            log.warning("export put off", extra={**extra, "cause": str(error)})
        finally:
            under_way.discard(export.export_id)
