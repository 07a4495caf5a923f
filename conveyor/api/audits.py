"""Audits over HTTP (docs/api.md, Audit)."""

from __future__ import annotations

from conveyor.api.call import Call, Reply, json_reply
from conveyor.usecases import audits
from conveyor.usecases.lookups import own_job, own_run
from conveyor.wire.responses import AuditResponse


async def get_audit(call: Call) -> Reply:
    job = await own_job(call.env, call.caller, call.ids["job_id"])
    run = await own_run(call.env, job, call.ids["run_id"])
    with call.api.requests.hold_audit(call.caller):
        seen = await audits.audit(call.env, run)
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
