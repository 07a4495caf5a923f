"""The Webhooks page: receivers, deliveries, tests and signing keys, with their forms."""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import NotFound
from conveyor.ui.access import Forbidden
from conveyor.ui.client import LocalClient
from conveyor.ui.visit import Page, Redirect, Visit

_JOBS_SHOWN = 100
_TEMPLATE = "webhooks.html"


async def webhooks(visit: Visit) -> Page:
    return Page(_TEMPLATE, await _values(visit))


async def _values(visit: Visit) -> dict[str, Any]:
    """The page without the result of a form."""
    job_id = visit.query.get("job", "").strip()
    values: dict[str, Any] = {
        "jobs": [],
        "job": None,
        "deliveries": None,
        "keys": None,
        "secret": None,
        "tested": None,
        "done": visit.query.get("done", ""),
    }
    if visit.viewer.principal is not None:
        own = visit.own()
        page = await own.get("listJobs", limit=str(_JOBS_SHOWN))
        values["jobs"] = [job for job in page.jobs if job.webhook is not None]
        values["keys"] = await own.get("listHMACKeys")
    if job_id:
        client = await visit.client_for(job_id)
        values["job"] = await client.get("getJob", {"job_id": job_id})
        values["deliveries"] = await client.get(
            "listJobWebhookDeliveries",
            {"job_id": job_id},
            limit="50",
            cursor=visit.query.get("cursor"),
        )
    return values


async def set_webhook(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    body = {"url": visit.field("url"), "signature": bool(visit.field("signature"))}
    await client.do("putJobWebhook", visit.ids, body=body)
    return _to_job(visit, "webhook")


async def remove_webhook(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    await client.do("deleteJobWebhook", visit.ids)
    return _to_job(visit, "webhook_removed")


async def redeliver(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    event_id = visit.field("event_id")
    if not event_id.isalnum():
        raise NotFound("There is no such delivery.")
    await client.do("redeliverJobWebhookEvent", {**visit.ids, "event_id": event_id})
    return _to_job(visit, "redelivered")


def _to_job(visit: Visit, done: str) -> Redirect:
    return Redirect(f"/ui/webhooks?job={visit.ids['job_id']}&done={done}")


async def test(visit: Visit) -> Page:
    body = {"url": visit.field("url"), "signature": bool(visit.field("signature"))}
    tested = await _own(visit).do("testWebhook", body=body)
    return Page(_TEMPLATE, {**await _values(visit), "tested": tested})


async def rotate_key(visit: Visit) -> Page:
    """Answers with the secret, which is shown this once and never to an operator."""
    key = await _own(visit).do("rotateHMACKey")
    return Page(_TEMPLATE, {**await _values(visit), "secret": key})


async def finalize_key(visit: Visit) -> Redirect:
    await _own(visit).do("finalizeHMACKey")
    return Redirect("/ui/webhooks?done=key_finalized")


async def cancel_rotation(visit: Visit) -> Redirect:
    await _own(visit).do("cancelHMACRotation")
    return Redirect("/ui/webhooks?done=key_cancelled")


def _own(visit: Visit) -> LocalClient:
    if visit.viewer.principal is None:
        raise Forbidden("Signing keys belong to a caller: sign in with an API key.")
    return visit.own()
