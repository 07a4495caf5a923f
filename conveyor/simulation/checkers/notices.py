"""Notices: webhooks (SPEC.md 6: I41 to I43)."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64encode
from collections.abc import Iterator

from conveyor.domain.ids import NoticeId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import NoticeStatus
from conveyor.simulation.history import Delivery
from conveyor.simulation.watcher import Moment


def every_event_is_told_or_given_up(moment: Moment) -> Iterator[str]:
    """I41: each event was delivered, or it is on record why not."""
    heard = {each.event_id for each in moment.history.deliveries if each.status == 204}
    for notice in moment.after.notices.values():
        if notice.status is NoticeStatus.DUE:
            yield f"event {notice.notice_id} is still due, after {notice.attempts} tries"
        if notice.status is NoticeStatus.DELIVERED and notice.notice_id not in heard:
            yield f"event {notice.notice_id} counts as delivered, and nobody heard it"


def one_event_is_one_message(moment: Moment, delivery: Delivery) -> Iterator[str]:
    """I42: every try of an event carries the same id and bytes."""
    for other in moment.history.deliveries:
        if other.event_id == delivery.event_id and other.body != delivery.body:
            yield f"event {delivery.event_id} was told in two ways"
            break


def an_event_is_redelivered_for_its_owner(moment: Moment, delivery: Delivery) -> Iterator[str]:
    """I44: in a world that is spared, an event that its receiver took comes again only if the owner
    of its job asked for it."""
    history = moment.history
    if not history.is_spared or history.kills_count:
        return
    taken = [
        each
        for each in history.deliveries
        if each is not delivery and each.event_id == delivery.event_id and each.status == 204
    ]
    if not taken:
        return
    tenants = {
        call.tenant
        for call in history.calls
        if call.method == "POST" and call.route.endswith(f"/{delivery.event_id}/redeliver")
    }
    notice = moment.after.notices.get((delivery.event_id,))
    promise = history.promises.get(notice.job_id) if notice is not None else None
    if promise is not None and promise.tenant not in tenants:
        yield f"event {delivery.event_id} came again, and {promise.tenant} did not ask for it"


def every_signature_verifies(moment: Moment) -> Iterator[str]:
    """I42: what is signed is signed with a key of its caller, over the bytes that came. Who borrows
    a request has webhooks at the address of another."""
    job_ids = {notice.notice_id: notice.job_id for notice in moment.after.notices.values()}
    for delivery in moment.history.deliveries:
        signature = delivery.headers.get("webhook-signature")
        promise = moment.history.promises.get(job_ids.get(NoticeId(delivery.event_id), ""))
        if signature is None or promise is None:
            continue
        tenant = promise.tenant
        secrets = moment.history.signing_secrets.get(tenant, [])
        if None in secrets:
            continue
        if not _verifies(delivery, signature, [each for each in secrets if each is not None]):
            yield f"event {delivery.event_id} has a signature that no key of {tenant} made"


def _verifies(delivery: Delivery, signature: str, secrets: list[bytes]) -> bool:
    at = delivery.headers["webhook-timestamp"]
    signed = f"{delivery.event_id}.{at}.".encode() + delivery.body
    made = {b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets}
    return any(each.removeprefix("v1,") in made for each in signature.split())


def no_event_before_its_end(moment: Moment, delivery: Delivery) -> Iterator[str]:
    """I43: who hears of an end finds it in the rows."""
    told = json.loads(delivery.body)
    run_id = _run_id_of(told)
    run = moment.after.run_by_id.get(run_id) if run_id else None
    if run is not None and run.status in RUN_LIVE:
        yield f"event {delivery.event_id} tells of the end of run {run_id}, which is {run.status}"


def _run_id_of(told: dict[str, object]) -> str | None:
    data = told.get("data", told)
    run_id = data.get("run_id") if isinstance(data, dict) else None
    return run_id if isinstance(run_id, str) else None
