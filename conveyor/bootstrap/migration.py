"""`conveyor migrate-engine`: copies a stopped data directory into Postgres, and verifies the copy
by the audits of both sides (docs/engines.md, Migration from SQLite to Postgres).

Every step goes on where it was killed. The directory is marked before the first row is copied, and
no process may serve the database before the last audit, so two engines never serve the same tasks.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from actors.tree import Mailboxes
from conveyor.bootstrap.runtime import POSTGRES, make_env, require_extra
from conveyor.config import BadSettings, Settings
from conveyor.domain import ids
from conveyor.domain.changes import ROW_KINDS, RowKind, RunKey
from conveyor.domain.errors import ConveyorError
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.engines.executor import COMPUTE_THREADS_MAX, ThreadExecutor
from conveyor.engines.sqlite import migration as source_files
from conveyor.engines.sqlite import open_engine
from conveyor.engines.sqlite.migration import Migration, SourceRows
from conveyor.engines.system import SystemClock, check_secret
from conveyor.ports.blobs import Blobs
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from conveyor.usecases.context import Context
from conveyor.usecases.run.audit import audit

__all__ = ["MigrationFailed", "migrate_engine"]

# Rows per transaction, and files of bodies per step. A kill repeats at most one page.
_PAGE_ROWS = 5_000
_PAGE_FILES = 100
_QUEUES, _MESSAGES, _BODIES, _AUDITS = "queues", "messages", "bodies", "audits"
# Runs first: the copy of their tasks needs the tables that they get.
_KINDS = sorted(ROW_KINDS, key=lambda kind: kind.key_type is not RunKey)
_STEPS = (*(kind.table for kind in _KINDS), _QUEUES, _MESSAGES, _BODIES, _AUDITS)

#: Called with the name of a step and how many rows, files or runs it has done since the start.
Report = Callable[[str, int], object]
# A page of a step: returns how much it did and the position behind it, or None after the last one.
_Page = Callable[[Any], Awaitable[tuple[int, Any] | None]]


class MigrationFailed(ConveyorError):
    """The data cannot be migrated, or the copy differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator


async def migrate_engine(
    settings: Settings, data_dir: Path, randomness: random.Random, report: Report
) -> bool:
    """Copies `data_dir` into the database and the bodies of these settings. Returns False if that
    was completed before."""
    if settings.engine != POSTGRES:
        raise BadSettings(
            "name the target: CONVEYOR_ENGINE=postgres with CONVEYOR_DATABASE_URL, and "
            "CONVEYOR_BLOB_DIR or CONVEYOR_BUCKET"
        )
    source_files.require_no_process(data_dir)
    async with _open_copy(settings, data_dir, randomness, report) as copy:
        progress = await copy.target.find_progress()
        if progress is not None and progress.has_ended:
            return False
        if progress is None:
            if copy.is_marked:
                raise MigrationFailed(
                    f"the migration of {data_dir} began in another database: name that one in "
                    "CONVEYOR_DATABASE_URL"
                )
            await copy.target.begin(_STEPS[0])
            source_files.mark_migration(data_dir, copy.migration)
            await copy.run(_STEPS[0], None)
        else:
            await copy.run(progress.step, progress.position)
        await copy.target.end()
    return True


@asynccontextmanager
async def _open_copy(
    settings: Settings, data_dir: Path, randomness: random.Random, report: Report
) -> AsyncGenerator[_Copy, None]:
    with require_extra(settings):
        from conveyor.bootstrap.postgres import config_of, open_blobs
        from conveyor.engines.postgres.engine import check_secret as check_target_secret
        from conveyor.engines.postgres.engine import open_postgres
        from conveyor.engines.postgres.migration import MigrationTarget

    clock, executor = SystemClock(), ThreadExecutor()
    mark = source_files.find_migration(data_dir)
    migration = mark or Migration(
        migration_id=ids.mint_ulid(clock.now(), randomness), started_at=clock.now()
    )
    async with (
        open_engine(
            data_dir,
            clock=clock,
            random=randomness,
            owner="migrate-engine",
            executor=executor,
            migration_id=migration.migration_id,
        ) as source,
        open_postgres(
            config_of(settings), random=randomness, migrates=True, for_migration=True
        ) as engine,
        open_blobs(
            settings, clock=clock, random=randomness, owner="migrate-engine", makes_folder=True
        ) as blobs,
    ):
        ports = _Ports(
            store=engine.store, queue=engine.queue, blobs=blobs, coordinator=engine.coordinator
        )
        of_source, of_target = (
            make_env(
                replace(settings, data_dir=data_dir),
                side,
                clock,
                randomness,
                Mailboxes(),
                ThreadExecutor(COMPUTE_THREADS_MAX),
            )
            for side in (source, ports)
        )
        # The same secret on both sides: otherwise nothing that is sealed could be read.
        check_secret(data_dir, of_source.secret_box)
        await check_target_secret(engine.database, of_target.secret_box)
        with source_files.open_rows(data_dir) as rows:
            yield _Copy(
                data_dir=data_dir,
                blob_dir=settings.postgres.blob_dir,
                migration=migration,
                is_marked=mark is not None,
                rows=rows,
                target=MigrationTarget(engine.database, migration.migration_id),
                of_source=of_source,
                of_target=of_target,
                executor=executor,
                report=report,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """The copy of one directory. `target` is the MigrationTarget, whose package is optional."""

    data_dir: Path
    blob_dir: Path | None
    migration: Migration
    is_marked: bool
    rows: SourceRows
    target: Any
    of_source: Context
    of_target: Context
    executor: ThreadExecutor
    report: Report
    _files: list[str] = field(default_factory=list)

    async def run(self, first: str, position: Any) -> None:
        """Does the steps from the position in the first one on."""
        self._files.extend(await self.executor.run(source_files.list_body_files, self.data_dir))
        for step in _STEPS[_STEPS.index(first) :]:
            await self._do(step, position)
            position = None

    async def _do(self, step: str, position: Any) -> None:
        """Does one step, page by page, from the position on."""
        pages: dict[str, _Page] = {
            **{kind.table: partial(self._copy_rows, kind) for kind in ROW_KINDS},
            _QUEUES: self._open_queues,
            _MESSAGES: self._send_messages,
            _BODIES: self._copy_bodies,
            _AUDITS: self._compare_audits,
        }
        done = 0
        await self.target.advance(step, position)
        while (page := await pages[step](position)) is not None:
            count, position = page
            done += count
            self.report(step, done)

    async def _copy_rows(self, kind: RowKind, after: Any) -> tuple[int, Any] | None:
        rows = await self.executor.run(self.rows.of_kind, kind, after, _PAGE_ROWS)
        if not rows:
            return None
        key_at = [kind.row_type.__struct_fields__.index(name) for name in kind.key_fields]
        position = [rows[-1][at] for at in key_at]
        await self.target.put_rows(kind, rows, position)
        return len(rows), position

    async def _open_queues(self, after: Any) -> tuple[int, Any] | None:
        rows = await self.executor.run(self.rows.open_queues, after or "", _PAGE_ROWS)
        if not rows:
            return None
        run_ids = [run_id for (run_id,) in rows]
        await self.target.put_queues(_QUEUES, run_ids, run_ids[-1])
        return len(rows), run_ids[-1]

    async def _send_messages(self, after: Any) -> tuple[int, Any] | None:
        steady = self.of_source.clock.steady()
        rows = await self.executor.run(self.rows.messages, after or 0, steady, _PAGE_ROWS)
        if not rows:
            return None
        position = rows[-1][0]
        await self.target.put_messages(_MESSAGES, [message[1:] for message in rows], position)
        return len(rows), position

    async def _copy_bodies(self, after: Any) -> tuple[int, Any] | None:
        start = 0 if after is None else bisect_right(self._files, after)
        names = self._files[start : start + _PAGE_FILES]
        if not names:
            return None
        if self.blob_dir is not None:
            await self.executor.run(
                source_files.link_body_files, self.data_dir, self.blob_dir, names
            )
        else:
            for name in names:
                pieces = source_files.read_body_file(self.data_dir, name, self.executor)
                bucket: Any = self.of_target.blobs
                await bucket.put_object(source_files.key_of_file(name), pieces)
        await self.target.advance(_BODIES, names[-1])
        return len(names), names[-1]

    async def _compare_audits(self, after: Any) -> tuple[int, Any] | None:
        """Audits the next run on both sides."""
        keys = await self.executor.run(self.rows.run_keys, after, 1)
        if not keys:
            return None
        ((job_id, run_id),) = keys
        run = await self.of_source.store.read(RunKey(job_id, run_id))
        if run is not None and run.status in RUN_VISIBLE:
            # The same randomness chooses the same bodies on both sides.
            sides = [
                await audit(replace(env, random=random.Random(run_id)), run)  # noqa: S311
                for env in (self.of_source, self.of_target)
            ]
            if sides[0] != sides[1]:
                raise MigrationFailed(f"run {run_id}: the audits differ: {sides[0]}; {sides[1]}")
        await self.target.advance(_AUDITS, [job_id, run_id])
        return 1, [job_id, run_id]
