"""IngestStreamer: ingests staged lists into their runs, outside of requests (SPEC.md 4.3).

Owns:    the batches that are being ingested in this process, a few at a time.
Hears:   BatchOpened, BatchStalled.
Says:    nothing: the use case signals discovery after each chunk.
Crashes: only by bug. The batch rows are the truth; the sweeper sends open batches again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import trio

from actors.messages import BatchOpened, BatchStalled, StreamerMessage
from actors.runtime import Inbox
from conveyor.domain.ids import BatchId, RunId
from conveyor.domain.model import Batch
from conveyor.ports.errors import BlobMissing, Unavailable
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.run import ingest, reconcile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestStreamer:
    env: Context
    metrics: Metrics | None = None
    # Batches at a time. Each holds two chunks in memory; more of them compete for the same store.
    at_once_max: int = 4

    async def run(self, inbox: Inbox[StreamerMessage]) -> None:
        ingesting: set[tuple[RunId, BatchId]] = set()
        if self.metrics is not None:
            self.metrics.ingest.running.set_function(lambda: len(ingesting))
        room = trio.CapacityLimiter(self.at_once_max)
        async with inbox, trio.open_nursery() as nursery:
            async for message in inbox:
                for batch in await self._batches(message):
                    key = (batch.run_id, batch.batch_id)
                    # The sweeper repeats a batch while it waits for room here.
                    if key not in ingesting:
                        ingesting.add(key)
                        nursery.start_soon(self._ingest, batch, ingesting, room)

    async def _batches(self, message: StreamerMessage) -> list[Batch]:
        match message:
            case BatchStalled(batch):
                return [batch]
            case BatchOpened(job_id, run_id):
                try:
                    return await ingest.open_batches_of(self.env, job_id, run_id)
                except Unavailable:
                    return []  # The sweeper finds open batches.
            case _:
                assert_never(message)

    async def _ingest(
        self, batch: Batch, ingesting: set[tuple[RunId, BatchId]], room: trio.CapacityLimiter
    ) -> None:
        extra = {"run": batch.run_id, "batch": batch.batch_id}
        try:
            async with room:
                # A batch that crashes its ingester is given up after a few attempts (SPEC.md 4.3).
                work = partial(reconcile.finish_batch, self.env, batch)
                outcome = await isolate(
                    work, "a batch", expects=(BlobMissing, ValueError), extra=extra
                )
            if not isinstance(outcome, Crash):
                log.info("batch ingested", extra={**extra, "outcome": outcome.value})
                if self.metrics is not None:
                    self.metrics.ingest.processed.labels(outcome.name.lower()).inc()
        except (Unavailable, BlobMissing, ValueError) as error:
            # The batch stays open. The sweeper sends it again, and it is given up after a few
            # attempts without progress.
            log.warning("batch deferred: engine unavailable", extra={**extra, "cause": str(error)})
        finally:
            ingesting.discard((batch.run_id, batch.batch_id))
