"""Call sites at which no story of the embedded kill matrix dies, each with its reason.

The matrix fails on a site that has neither a death nor an entry here. The simulator kills at most
of these sites (docs/simulator.md): it has virtual clocks, faults and competing processes.
"""

from __future__ import annotations

_DAYS = "only hours or days after the run has ended, in real time"
_RACE = "only when another process commits in between; `conveyor dev` is the only process"
_OUTAGE = "only when the engine or the storage fails, which a disk does not do on demand"
_CHARGES = "only with a gateway that charges; the pages of the stories cost nothing"
_AWS = "only on the AWS engine"
_CLOCK = "only after the wall clock is set back"
_MINUTE = "only a minute after the run has ended, in real time"
_LOOK = "only in a command; neither an API nor a worker calls it"

UNREACHED: dict[str, str] = {
    "blobs.delete_prefix@usecases.run.reconcile.sweep_expired": _DAYS,
    "store.commit@usecases.run.reconcile.sweep_expired": _DAYS,
    "store.read@usecases.run.reconcile._remove": _DAYS,
    "store.commit@usecases.run.reconcile._remove": _DAYS,
    "store.find@usecases.run.reconcile._is_all_of_job": _DAYS,
    "blobs.delete_prefix@usecases.export.process": _DAYS,
    "blobs.delete_prefix@usecases.submit.upload.remove_expired": _DAYS,
    "store.commit@usecases.submit.upload.remove_expired": _DAYS,
    "store.find@usecases.event_log._trim": "only after hundreds of events of one caller",
    "store.commit@usecases.event_log._trim": "only after thousands of events of one caller",
    "store.commit@usecases.export.ExportWriter._beat": "only in an export that takes long",
    "blobs.delete_prefix@usecases.export._make": _RACE,
    "blobs.delete_prefix@usecases.submit.upload.take": _RACE,
    "store.read@usecases.event_log._still_unplaced": _RACE,
    "store.read@usecases.idempotency._store_response": _RACE,
    "store.read@usecases.submit.jobs._admit": _RACE,
    "store.read@usecases.submit.jobs._admit_batch": _RACE,
    "store.read@usecases.run.rerun._start": _RACE,
    "store.commit@usecases.webhook.prepare": _RACE,
    "store.commit@usecases.export._commit_or_defer": _OUTAGE,
    "store.commit@usecases.idempotency.run_once_per_key": _OUTAGE,
    "store.commit@usecases.run.ingest.fail_batch": _OUTAGE,
    "store.read@usecases.run.ingest.fail_batch": _OUTAGE,
    "store.commit@usecases.run.reconcile.finish_batch": _OUTAGE,
    "store.commit@usecases.run.runs.fail": _OUTAGE,
    "store.commit@usecases.webhook.postpone": "only when many receivers are slow at the same time",
    "store.commit@usecases.webhook._has_its_turn": "only when an earlier event of the run waits",
    "queue.close_run@usecases.run.runs.ensure_queue": _RACE,
    "queue.send@usecases.run.reconcile._resend": "only when messages are lost; the embedded engine stores them as rows",
    "queue.bounce@actors.poller.host_limiter.HostLimiter._bounce": "only when no more messages can be held",
    "queue.extend@actors.poller.host_limiter.HeldMessages.extend_forever": "only when a message is held for long",
    "blobs.delete_prefix@usecases.submit.staging.delete_if_unreferenced": _RACE,
    "store.commit@usecases.run.ingest.ingest_batch": "only when an ingest continues after its run has ended",
    "queue.bounce@actors.poller.poller.RunPoller._return_unfunded": _CHARGES,
    "store.read@usecases.budget._active": _CHARGES,
    "coordinator.count@actors.cross_process_signals.CrossProcessSignals._count": _AWS,
    "queue.close_run@usecases.run.reconcile._close_queue": _MINUTE,
    "store.commit@usecases.run.reconcile._close_queue": _MINUTE,
    "store.commit@usecases.clock_repairs.pull_back": _CLOCK,
    "store.commit@usecases.clock_repairs.realign_schedules": _CLOCK,
    "store.find@usecases.run.run_progress.live_runs": _LOOK,
}


def reason_for(site: str, side: str) -> str | None:
    """Returns why no story dies at the point; None if one should."""
    return UNREACHED.get(site) or UNREACHED.get(f"{side}:{site}")
