"""Exports: asked for, made in one walk over a run's rows, published whole, removed (SPEC.md 4.19).

A run that has ended does not change, so the walk can be begun anew by anybody at any time; what
was half made is never seen, and the row's epoch decides whose file it is in the end.
"""

from __future__ import annotations

from contextlib import aclosing
from enum import Enum

import trio

from conveyor.domain import exporting, limits
from conveyor.domain.changes import Applied, Change, ExportKey, JobKey, RunKey
from conveyor.domain.errors import Conflict, NotFound
from conveyor.domain.export import Export, ExportFormat
from conveyor.domain.formats.entry import DamagedBody
from conveyor.domain.ids import CallerId, ExportId, is_ulid
from conveyor.domain.lifecycle import EXPORT_UNDONE, RUN_LIVE
from conveyor.domain.model import Run
from conveyor.domain.queries import DueExports
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.usecases import links
from conveyor.usecases.env import Env
from conveyor.usecases.expiry import expiries_of, refuse_expired_run
from conveyor.usecases.export_walk import Fenced, Walk
from conveyor.usecases.links import LetsIn, let_all_in
from conveyor.usecases.lookups import own_job, own_run, visible_run

_ABSENT = "There is no such export."
_LET_GO_S = 2.0


class Exported(Enum):
    """How a look at an export ended."""

    COMPLETED = "the file is there"
    PUT_OFF = "it did not work out this time"
    FAILED = "it was given up"
    FENCED = "somebody else has it, or it is gone"
    REMOVED = "its time is over"


async def start(
    env: Env, caller: CallerId, job_id: str, run_id: str, kind: ExportFormat, *, export_id: str
) -> Export:
    """Asks for an export of a run that has ended, or finds what was asked for under this id."""
    job = await own_job(env, caller, job_id)
    run = await own_run(env, job, run_id)
    if run.status in RUN_LIVE:
        raise Conflict(
            "The run has not ended; wait for it or stop it first.", code="run_not_terminal"
        )
    refuse_expired_run(env, run)
    export = exporting.new_export(run, ExportId(export_id), kind, now=env.now())
    if isinstance(await env.commit(exporting.ask(export)), Applied):
        return export
    return await own_export(env, caller, job_id, run_id, export_id)


async def own_export(
    env: Env, caller: CallerId, job_id: str, run_id: str, export_id: str
) -> Export:
    run = await own_run(env, await own_job(env, caller, job_id), run_id)
    return await _export_of(env, run, export_id)


def link_token(env: Env, export: Export) -> str:
    until = min(env.now() + limits.EXPORT_URL_TTL_S, export.expires_at)
    return links.make_token(env, _linked(export), purpose="export", until=until)


async def export_by_link(
    env: Env,
    run_key: RunKey,
    export_id: str,
    token: str,
    *,
    lets_in: LetsIn = let_all_in,
) -> Export:
    """The export that a signed link leads to; it dies with its job, its run, its own time and the
    key of its caller."""
    what = f"{run_key.job_id}/{run_key.run_id}/{export_id}"
    links.check_token(env, token, what, purpose="export", absent=_ABSENT)
    _, run = await visible_run(env, run_key.job_id, run_key.run_id, absent=_ABSENT)
    if not lets_in(run.caller):
        raise NotFound(_ABSENT)
    return await _export_of(env, run, export_id)


def _linked(export: Export) -> str:
    return f"{export.job_id}/{export.run_id}/{export.export_id}"


async def _export_of(env: Env, run: Run, export_id: str) -> Export:
    """Unknown and expired are the same, whether or not anybody has removed it."""
    key = ExportKey(run.job_id, run.run_id, ExportId(export_id))
    export = await env.store.read(key) if is_ulid(export_id) else None
    if export is None or export.expires_at <= env.now():
        raise NotFound(_ABSENT)
    return export


async def due(env: Env, *, limit: int) -> list[Export]:
    return await env.store.find(DueExports(due_by=env.now(), limit=limit))


async def see_to(env: Env, export: Export) -> Exported:
    """Does what is due: makes the file, gives it up, or removes it."""
    if export.expires_at <= env.now() or export.status not in EXPORT_UNDONE:
        await env.blobs.delete_prefix(_prefix(export))
        await env.commit(exporting.remove(export))
        return Exported.REMOVED
    if exporting.is_hopeless(export):
        return await _recorded(env, exporting.give_up(export, now=env.now()), Exported.FAILED)
    verdict = await env.commit(exporting.take_up(export, now=env.now()))
    if not isinstance(verdict, Applied):
        return Exported.FENCED
    (taken,) = verdict.rows
    assert isinstance(taken, Export)
    return await _make_or_let_go(env, taken)


async def _make_or_let_go(env: Env, export: Export) -> Exported:
    try:
        return await _make(env, export)
    except Fenced:
        return Exported.FENCED
    except DamagedBody as error:
        # The bytes do not come back: a caller who knows the task can run it again.
        change = exporting.give_up(export, str(error), now=env.now())
        return await _recorded(env, change, Exported.FAILED)
    except StorageFull:
        change = exporting.put_off(export, "storage is full", now=env.now())
        return await _recorded(env, change, Exported.PUT_OFF)
    except Unavailable:
        return await _let_go(env, export, delay_s=exporting.PUT_OFF_S)
    except trio.Cancelled:
        # Without this it would have to wait until the claim lapses, and have one try less.
        with trio.move_on_after(_LET_GO_S, shield=True):
            await _let_go(env, export, delay_s=0)
        raise


async def _let_go(env: Env, export: Export, *, delay_s: float) -> Exported:
    now = env.now()
    change = exporting.let_go(export, due_at=now + delay_s, now=now)
    return await _recorded(env, change, Exported.PUT_OFF)


async def _recorded(env: Env, change: Change, done: Exported) -> Exported:
    """If this cannot be written either, the claim lapses and somebody comes by again."""
    try:
        verdict = await env.commit(change)
    except Unavailable:
        return Exported.PUT_OFF
    return done if isinstance(verdict, Applied) else Exported.FENCED


async def _make(env: Env, export: Export) -> Exported:
    job = await env.store.read(JobKey(export.job_id))
    run = await env.store.read(RunKey(export.job_id, export.run_id))
    if job is None or run is None:
        return Exported.FENCED
    walk = Walk(env, export, run, job.format, await expiries_of(env, run))
    async with aclosing(walk.pieces()) as pieces:
        stored = await env.blobs.put_stream(f"{_own_prefix(export)}/file", pieces)
    change = exporting.publish(
        export,
        key=stored.key,
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        manifest=walk.manifest(),
        now=env.now(),
    )
    if isinstance(await env.commit(change), Applied):
        return Exported.COMPLETED
    await env.blobs.delete_prefix(_own_prefix(export))
    return Exported.FENCED


def _prefix(export: Export) -> str:
    return f"jobs/{export.job_id}/exports/{export.run_id}/{export.export_id}"


def _own_prefix(export: Export) -> str:
    """Whoever comes too late must not touch what another has made."""
    return f"{_prefix(export)}/{export.epoch}"
