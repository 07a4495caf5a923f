"""Checks webhooks: every event is delivered once it happened, or given up for a reason (SPEC.md 6:
I41 to I44)."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64encode
from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import NoticeId, RunId, notice_id
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import JobStatus, NoticeStatus, RunStatus
from conveyor.simulation.client_history import Delivery
from conveyor.simulation.invariant_monitor import StateChange


def every_event_is_delivered_or_given_up(state: StateChange) -> Iterator[str]:
    """I41: each event was delivered, or its notice says why not."""
    heard = {delivery.event_id for delivery in state.history.deliveries if delivery.status == 204}
    for notice in state.after.notices.values():
        if notice.status is NoticeStatus.DUE:
            yield f"event {notice.notice_id} is still due, after {notice.attempts} attempts"
        if notice.status is NoticeStatus.DELIVERED and notice.notice_id not in heard:
            yield f"event {notice.notice_id} counts as delivered, and no receiver accepted it"


def one_event_is_one_message(state: StateChange, delivery: Delivery) -> Iterator[str]:
    """I42: every attempt to deliver an event carries the same id and bytes."""
    for other in state.history.deliveries:
        if other.event_id == delivery.event_id and other.body != delivery.body:
            yield f"event {delivery.event_id} was delivered with two different bodies"
            break


def an_event_is_redelivered_for_its_owner(state: StateChange, delivery: Delivery) -> Iterator[str]:
    """I44: in a world without internal faults, an event that its receiver accepted is delivered
    again only if the owner of its job asked for it."""
    history = state.history
    if not history.is_fault_free or history.kills_count:
        return
    taken = [
        other
        for other in history.deliveries
        if other is not delivery and other.event_id == delivery.event_id and other.status == 204
    ]
    if not taken:
        return
    tenants = {
        call.tenant
        for call in history.calls
        if call.method == "POST" and call.route.endswith(f"/{delivery.event_id}/redeliver")
    }
    notice = state.after.notices.get((delivery.event_id,))
    accepted = history.accepted_requests.get(notice.job_id) if notice is not None else None
    if accepted is not None and accepted.tenant not in tenants:
        yield f"event {delivery.event_id} delivered again, and {accepted.tenant} did not ask"


def every_signature_verifies(state: StateChange) -> Iterator[str]:
    """I42: a signature is made with a key of the caller of the job, over the bytes that were
    received. A client that repeats the request of another one has webhooks at the address of the
    other."""
    job_ids = {notice.notice_id: notice.job_id for notice in state.after.notices.values()}
    for delivery in state.history.deliveries:
        signature = delivery.headers.get("webhook-signature")
        accepted = state.history.accepted_requests.get(job_ids.get(NoticeId(delivery.event_id), ""))
        if signature is None or accepted is None:
            continue
        tenant = accepted.tenant
        secrets = state.history.signing_secrets.get(tenant, [])
        if None in secrets:
            continue
        if not _verifies(delivery, signature, [secret for secret in secrets if secret is not None]):
            yield f"event {delivery.event_id} has a signature that no key of {tenant} made"


def _verifies(delivery: Delivery, signature: str, secrets: list[bytes]) -> bool:
    at = delivery.headers["webhook-timestamp"]
    signed = f"{delivery.event_id}.{at}.".encode() + delivery.body
    digests = {
        b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets
    }
    return any(part.removeprefix("v1,") in digests for part in signature.split())


def no_event_before_its_end(state: StateChange, delivery: Delivery) -> Iterator[str]:
    """I43: when an event about the end of a run arrives, the row of the run shows the end."""
    event = json.loads(delivery.body)
    run_id = _run_id_of(event)
    run = state.after.run_by_id.get(run_id) if run_id else None
    if run is not None and run.status in RUN_LIVE:
        yield f"event {delivery.event_id} reports the end of run {run_id}, still {run.status}"


def _run_id_of(event: dict[str, object]) -> str | None:
    data = event.get("data", event)
    run_id = data.get("run_id") if isinstance(data, dict) else None
    return run_id if isinstance(run_id, str) else None


# Notices: each end of a run has one, with one id, and it is given up only for a reason (I41, I42).


_ENDS = (RunStatus.COMPLETED, RunStatus.STOPPED, RunStatus.FAILED)
# A receiver that answers this status has been removed: the notice is not sent again.
_GONE = 410


def the_notice_is_written_with_the_end(state: StateChange) -> Iterator[str]:
    """I41: if the job has a webhook, the notice of a run's end is written together with the end."""
    for change in state.changed(RunKey):
        run = change.new
        if run is None or run.status not in _ENDS:
            continue
        if change.old is not None and change.old.status in _ENDS:
            # It had ended before; this change only closed its queue or expired its results.
            continue
        job = state.after.jobs.get((run.job_id,))
        if job is None or job.webhook is None or job.status is JobStatus.DELETED:
            continue
        before = state.before.jobs.get((run.job_id,))
        if before is not None and before.webhook is None:
            continue  # The webhook was added since the last snapshot, perhaps after the end.
        names = {notice_id(RunId(run.run_id), f"run.{end}") for end in _ENDS}
        if not names & {notice.notice_id for notice in state.after.notices.values()}:
            yield f"run {run.run_id} is {run.status}, and has no notice"


def nothing_is_given_up_early(state: StateChange) -> Iterator[str]:
    """I41: a notice is given up only when its receiver is gone, or after the whole time for
    retries. Where clocks leap by days, virtual time is used: no notice is older than its world."""
    for notice in state.after.notices.values():
        if notice.status is not NoticeStatus.EXHAUSTED:
            continue
        was_gone = bool(notice.tries) and notice.tries[-1].status == _GONE
        waited_s = state.after.now - notice.due_since
        if state.history.leaps_days:
            waited_s = state.after.at
        if not was_gone and waited_s < limits.WEBHOOK_GIVE_UP_S:
            yield f"event {notice.notice_id} was given up after {notice.attempts} attempts"


def a_message_has_the_name_of_its_event(state: StateChange, delivery: Delivery) -> Iterator[str]:
    """I42: the delivery id is that of the event, in every attempt."""
    known = {notice.notice_id for notice in state.after.notices.values()}
    if delivery.event_id not in known and f'"{delivery.event_id}"'.encode() not in delivery.body:
        yield f"a delivery to {delivery.url} has the id {delivery.event_id}, which no event has"
