"""Runs over HTTP: list, show, stop, pause, resume, delete (SPEC.md 3)."""

from __future__ import annotations

from functools import partial

import msgspec

from conveyor.api.call import Call, Reply, Work, json_reply
from conveyor.domain import limits, paging
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.domain.model import PauseState, Run
from conveyor.domain.queries import RunsOf
from conveyor.domain.totals import Totals
from conveyor.usecases import counts, expiry, outlook, runs
from conveyor.usecases.budgets import budget_of
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import own_job, own_run, totals_of
from conveyor.usecases.results import owner_scope
from conveyor.wire.responses import ListJobRunsResponse, ReceiptResponse, RunResponse
from conveyor.wire.views import run_view


async def show_run(env: Env, run: Run, totals: Totals | None = None) -> RunResponse:
    """For who changed something: what it is shown is as new as its change."""
    if totals is None:
        totals = await totals_of(env, run)
    await counts.outdate(env, run)
    return await _view(env, run, totals)


async def glance_at_run(env: Env, run: Run) -> RunResponse:
    """For who only looks."""
    return await _view(env, run, await counts.glance(env, run))


async def _view(env: Env, run: Run, totals: Totals) -> RunResponse:
    seen = await outlook.look_at(env, run, totals)
    budget = await budget_of(env, run)
    shown = msgspec.structs.replace(run, expires_at=expiry.run_instant(env, run))
    return run_view(shown, totals, seen.inflight, seen.waiting_on, seen.eta_s, budget)


async def list_runs(call: Call) -> Reply:
    env = call.env
    limit = call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX)
    job = await own_job(env, call.caller, call.ids["job_id"])
    scope = owner_scope(call.caller, f"runs|{job.job_id}")
    sign = partial(env.vault.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    before = None if cursor is None else int(paging.read_cursor(cursor, scope=scope, sign=sign))
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, before=before, limit=limit + 1)
    rows = await env.store.find(query)
    shown = [await glance_at_run(env, run) for run in rows[:limit]]
    if len(rows) <= limit:
        return json_reply(ListJobRunsResponse(shown, None))
    following = paging.make_cursor(str(rows[limit - 1].sequence), scope=scope, sign=sign)
    return json_reply(ListJobRunsResponse(shown, following))


async def get_run(call: Call) -> Reply:
    job = await own_job(call.env, call.caller, call.ids["job_id"])
    run = await own_run(call.env, job, call.ids["run_id"])
    return json_reply(await glance_at_run(call.env, run))


def stop(call: Call) -> Work:
    return partial(_stop, call)


async def _stop(call: Call, _: str) -> Reply:
    stopped = await runs.stop(call.env, call.caller, call.ids["job_id"])
    leases = await runs.count_leases(call.env, stopped.run)
    receipt = ReceiptResponse(
        complete=stopped.receipt.complete,
        # No lease is no proof: only a receipt that is complete may say that nothing is in flight.
        inflight=0 if stopped.receipt.complete else leases or None,
        leases=leases,
        released=stopped.receipt.released,
        abandoned=stopped.receipt.abandoned,
    )
    view = await show_run(call.env, stopped.run, stopped.totals)
    return json_reply(msgspec.structs.replace(view, receipt=receipt))


def pause(call: Call) -> Work:
    return partial(_set_pause, call, PauseState.PAUSED)


def resume(call: Call) -> Work:
    return partial(_set_pause, call, PauseState.ACTIVE)


async def _set_pause(call: Call, state: PauseState, _: str) -> Reply:
    run = await runs.set_pause(call.env, call.caller, call.ids["job_id"], state)
    return json_reply(await show_run(call.env, run))


def delete_run(call: Call) -> Work:
    return partial(_delete_run, call)


async def _delete_run(call: Call, _: str) -> Reply:
    await runs.delete_run(call.env, call.caller, call.ids["job_id"], call.ids["run_id"])
    return Reply(202)
