"""Exporter: makes requested export files, and removes them when they expire (SPEC.md 4.19).

Owns:    the exports in progress, a few at a time.
Hears:   nothing: the rows are the queue, which is queried every `period_s`.
Says:    nothing.
Crashes: only by bug. An interrupted export is due again and starts over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.limiters.fair_turns import FairTurns
from actors.worker_roster import Roster
from conveyor.domain.changes import JobKey
from conveyor.domain.export_record import Export
from conveyor.domain.ids import CallerId, ExportId, JobId
from conveyor.ports.errors import RowDamaged, Unavailable
from conveyor.telemetry import Metrics
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate

log = logging.getLogger(__name__)

# Due exports per query. With fewer, the exports of one caller could fill the page, and those of
# other callers would not be seen.
DUE_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    env: Context
    roster: Roster = field(default_factory=Roster.of_one)
    metrics: Metrics | None = None
    period_s: float = 0.5
    # More exports at once need more memory (a page and a group of bodies each) and compete with
    # scraping for the storage.
    at_once_max: int = 4

    async def run(self) -> None:
        under_way: dict[ExportId, CallerId] = {}
        if self.metrics is not None:
            self.metrics.exports.running.set_function(lambda: len(under_way))
        # Half of all: an export cannot be interrupted for another caller's.
        turns = FairTurns(at_once_max=self.at_once_max, caller_max=max(1, self.at_once_max // 2))
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    for export, caller in await self._choose_exports(under_way, turns):
                        under_way[export.export_id] = caller
                        nursery.start_soon(self._run_export, export, under_way)
                except Unavailable as error:
                    log.warning("exports not read", extra={"cause": str(error)})
                if under_way:
                    await trio.sleep(self.period_s)
                else:
                    await self.roster.wait_turn("exports", self.period_s)

    async def _choose_exports(
        self, under_way: Mapping[ExportId, CallerId], turns: FairTurns
    ) -> list[tuple[Export, CallerId]]:
        if len(under_way) >= self.at_once_max:
            return []
        due: list[tuple[Export, CallerId]] = []
        owners: dict[JobId, CallerId] = {}
        for export in await exports.due(self.env, limit=DUE_MAX):
            if export.job_id not in owners:
                owners[export.job_id] = await self._owner_of(export.job_id)
            if export.export_id not in under_way:
                due.append((export, owners[export.job_id]))
        return turns.choose(due, under_way.values())

    async def _owner_of(self, job_id: JobId) -> CallerId:
        """Returns the caller of a job. Exports of a job that is deleted or has a damaged row share
        one caller."""
        try:
            job = await self.env.store.read(JobKey(job_id))
        except RowDamaged:
            job = None
        return CallerId("") if job is None else job.caller

    async def _run_export(self, export: Export, under_way: dict[ExportId, CallerId]) -> None:
        extra = {"run": export.run_id, "export": export.export_id}
        try:
            # An export that crashes the exporter is due again when its claim lapses, for a few
            # attempts.
            outcome = await isolate(
                partial(exports.process, self.env, export), "an export", extra=extra
            )
            if isinstance(outcome, Crash):
                return
            level = logging.WARNING if outcome is exports.Exported.FAILED else logging.INFO
            log.log(level, "export processed", extra={**extra, "outcome": outcome.value})
            if self.metrics is not None:
                self.metrics.exports.processed.labels(outcome.name.lower()).inc()
        except Unavailable as error:
            log.warning("export deferred: engine unavailable", extra={**extra, "cause": str(error)})
        finally:
            del under_way[export.export_id]
