"""The outbox: every end is told, under one name, and given up only for a reason (I41, I42)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import RunId, notice_id
from conveyor.domain.model import JobStatus, NoticeStatus, RunStatus
from conveyor.simulation.history import Delivery
from conveyor.simulation.watcher import Moment

_ENDS = (RunStatus.COMPLETED, RunStatus.STOPPED, RunStatus.FAILED)
_GONE = 410


def an_end_is_told_with_the_flip(moment: Moment) -> Iterator[str]:
    """I41: where there is a webhook, the notice of a run's end is there as soon as the end is."""
    for change in moment.changed(RunKey):
        run = change.new
        if run is None or run.status not in _ENDS:
            continue
        if change.old is not None and change.old.status in _ENDS:
            continue  # It had ended before: its queue is closed, or its results have expired.
        job = moment.after.jobs.get((run.job_id,))
        if job is None or job.webhook is None or job.status is JobStatus.DELETED:
            continue
        before = moment.before.jobs.get((run.job_id,))
        if before is not None and before.webhook is None:
            continue  # It was given one since, maybe after the end.
        names = {notice_id(RunId(run.run_id), f"run.{end}") for end in _ENDS}
        if not names & {notice.notice_id for notice in moment.after.notices.values()}:
            yield f"run {run.run_id} is {run.status}, and nobody will be told"


def nothing_is_given_up_early(moment: Moment) -> Iterator[str]:
    """I41: a notice is given up when its receiver is gone, or after all its time."""
    for notice in moment.after.notices.values():
        if notice.status is not NoticeStatus.EXHAUSTED:
            continue
        was_gone = bool(notice.tries) and notice.tries[-1].status == _GONE
        waited_s = moment.after.now - notice.due_since
        if not was_gone and waited_s < limits.WEBHOOK_GIVE_UP_S:
            yield f"event {notice.notice_id} was given up after {notice.attempts} tries"


def a_message_has_the_name_of_its_event(moment: Moment, delivery: Delivery) -> Iterator[str]:
    """I42: what a receiver is told carries the id of the event, whichever try it is."""
    known = {notice.notice_id for notice in moment.after.notices.values()}
    if delivery.event_id not in known and f'"{delivery.event_id}"'.encode() not in delivery.body:
        yield f"a delivery to {delivery.url} has the id {delivery.event_id}, which no event has"
