"""Runs over HTTP: list, show, stop, pause, resume, delete (SPEC.md 3)."""

from __future__ import annotations

from functools import partial

import msgspec

from conveyor.api.server.request_context import RequestContext, Response, Work, json_reply
from conveyor.domain import limits, queries
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.domain.model import PauseState, Run
from conveyor.domain.queries import RunsOf
from conveyor.domain.run.counters import Totals
from conveyor.schemas.responses import (
    AuditResponse,
    ListJobRunsResponse,
    ReceiptResponse,
    RunResponse,
)
from conveyor.schemas.views import run_view
from conveyor.usecases.budget import budget_of
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job, load_owned_run, totals_of
from conveyor.usecases.run import audit, results, run_progress, runs
from conveyor.usecases.run.results import owner_scope


async def fresh_run_response(env: Context, run: Run, totals: Totals | None = None) -> RunResponse:
    """The response to a change. It contains the change: totals are not read from the cache."""
    if totals is None:
        totals = await totals_of(env, run)
    await run_progress.invalidate_totals(env, run)
    return await _view(env, run, totals)


async def cached_run_response(env: Context, run: Run) -> RunResponse:
    """The response to a read. Its totals may come from the cache."""
    return await _view(env, run, await run_progress.cached_totals(env, run))


async def _view(env: Context, run: Run, totals: Totals) -> RunResponse:
    seen = await run_progress.load_progress(env, run, totals)
    budget = await budget_of(env, run)
    shown = msgspec.structs.replace(run, expires_at=results.run_instant(env, run))
    return run_view(shown, totals, seen.inflight, seen.waiting_on, seen.eta_s, budget)


async def list_runs(call: RequestContext) -> Response:
    env = call.env
    limit = call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX)
    job = await load_owned_job(env, call.caller, call.ids["job_id"])
    scope = owner_scope(call.caller, f"runs|{job.job_id}")
    sign = partial(env.secret_box.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    before = None if cursor is None else int(queries.read_cursor(cursor, scope=scope, sign=sign))
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, before=before, limit=limit + 1)
    rows = await env.store.find(query)
    shown = [await cached_run_response(env, run) for run in rows[:limit]]
    if len(rows) <= limit:
        return json_reply(ListJobRunsResponse(shown, None))
    following = queries.make_cursor(str(rows[limit - 1].sequence), scope=scope, sign=sign)
    return json_reply(ListJobRunsResponse(shown, following))


async def get_run(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    run = await load_owned_run(call.env, job, call.ids["run_id"])
    return json_reply(await cached_run_response(call.env, run))


def stop(call: RequestContext) -> Work:
    return partial(_stop, call)


async def _stop(call: RequestContext, _: str) -> Response:
    stopped = await runs.stop(call.env, call.caller, call.ids["job_id"])
    leases = await runs.count_leases(call.env, stopped.run)
    receipt = ReceiptResponse(
        complete=stopped.receipt.complete,
        # No lease is no proof that no task runs. Only a complete receipt proves it.
        inflight=0 if stopped.receipt.complete else leases or None,
        leases=leases,
        released=stopped.receipt.released,
        abandoned=stopped.receipt.abandoned,
    )
    view = await fresh_run_response(call.env, stopped.run, stopped.totals)
    return json_reply(msgspec.structs.replace(view, receipt=receipt))


def pause(call: RequestContext) -> Work:
    return partial(_set_pause, call, PauseState.PAUSED)


def resume(call: RequestContext) -> Work:
    return partial(_set_pause, call, PauseState.ACTIVE)


async def _set_pause(call: RequestContext, state: PauseState, _: str) -> Response:
    run = await runs.set_pause(call.env, call.caller, call.ids["job_id"], state)
    return json_reply(await fresh_run_response(call.env, run))


def delete_run(call: RequestContext) -> Work:
    return partial(_delete_run, call)


async def _delete_run(call: RequestContext, _: str) -> Response:
    await runs.delete_run(call.env, call.caller, call.ids["job_id"], call.ids["run_id"])
    return Response(202)


# Audits over HTTP (docs/api.md, Audit).


async def get_audit(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    run = await load_owned_run(call.env, job, call.ids["run_id"])
    with call.api.requests.hold_audit(call.caller):
        seen = await audit.audit(call.env, run)
    body = AuditResponse(
        job_id=run.job_id,
        run_id=run.run_id,
        ok=seen.is_ok,
        live=seen.is_live,
        counts=seen.counts,
        differences=seen.differences,
        bodies_checked=seen.bodies,
        bad_bodies=seen.bad_bodies,
    )
    return json_reply(body)
