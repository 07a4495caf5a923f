"""The state of a running scrape for `conveyor ps`."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from actors.runtime import Node
from conveyor import __version__
from conveyor.cli.scrape.scraper import Scraper
from conveyor.process_status import RunLine, Snapshot


def snapshot_of(scraper: Scraper, folder: Path, slots: int, started_at: float) -> Snapshot:
    progress = scraper.progress
    seconds = max(trio.current_time() - started_at, 0.001)
    rate = progress.fetched / seconds
    left = progress.total - progress.done
    node = Node(
        name="scrape",
        kind="process",
        state="running",
        restarts=0,
        mailbox_depth=None,
        mailbox_capacity=None,
        uptime_s=seconds,
        last_error=None,
        children=(),
    )
    run = RunLine(
        job_id=folder.name,
        run_id=str(folder),
        status="running",
        total=progress.total,
        completed=progress.done,
        successful=progress.successful,
        failed=progress.failed,
        eta_s=left / rate if rate else None,
    )
    return Snapshot(
        pid=os.getpid(),
        role="scrape",
        version=__version__,
        inflight=len(progress.inflight),
        capacity=slots,
        tree=node,
        runs=[run],
    )
