"""The Webhooks page: receivers, deliveries, tests and signing keys, with their forms."""

from __future__ import annotations

from typing import Any, NamedTuple

from conveyor.domain.errors import NotFound
from conveyor.schemas.responses import DeliveryResponse, JobResponse
from conveyor.ui.access import Forbidden
from conveyor.ui.client import LocalClient
from conveyor.ui.pages import latest_jobs
from conveyor.ui.visit import Page, Redirect, Visit

_JOBS_READ = 100
# Each receiver costs a query for its latest delivery.
_RECEIVERS_SHOWN = 15
_TEMPLATE = "webhooks.html"


async def webhooks(visit: Visit) -> Page:
    return Page(_TEMPLATE, await _values(visit))


async def _values(visit: Visit) -> dict[str, Any]:
    """The page without the result of a form."""
    job_id = visit.query.get("job", "").strip()
    values: dict[str, Any] = {
        "receivers": [] if visit.is_update else await _receivers(visit),
        "job": None,
        "deliveries": None,
        "keys": None,
        "secret": None,
        "tested": None,
        "done": visit.query.get("done", ""),
    }
    if visit.viewer.principal is not None:
        values["keys"] = await visit.own().get("listHMACKeys")
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


class Receiver(NamedTuple):
    """A job with a webhook, and its latest delivery if there is one."""

    job: JobResponse
    latest: DeliveryResponse | None


async def _receivers(visit: Visit) -> list[Receiver]:
    jobs = [job for job in await latest_jobs(visit, _JOBS_READ) if job.webhook is not None]
    receivers: list[Receiver] = []
    for job in jobs[:_RECEIVERS_SHOWN]:
        client = await visit.client_for(job.job_id)
        ids = {"job_id": job.job_id}
        page = await client.get("listJobWebhookDeliveries", ids, limit="1")
        receivers.append(Receiver(job, page.deliveries[0] if page.deliveries else None))
    return receivers


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
