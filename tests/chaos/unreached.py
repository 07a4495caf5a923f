"""Call sites at which no story of the embedded kill matrix dies, by name, each with its reason.

The matrix fails over a site that is neither died at nor here. The simulator kills at most of these
(docs/simulator.md): it has clocks, faults and rivals that a story with one real process has not.
"""

from __future__ import annotations

_DAYS = "only hours or days after the run has ended; time is real here"
_RACE = "only when another process commits in between; `conveyor dev` is alone on its data"
_OUTAGE = "only when the engine or the storage fails, which a disk does not do on demand"
_CHARGES = "only with a gateway that charges; the stories' pages cost nothing"
_AWS = "only on the AWS engine"
_CLOCK = "only after the wall clock was set back"
_MINUTE = "only a minute after the run has ended; time is real here"
_LOOK = "a command that looks at what lies there; neither an API nor a worker"

UNREACHED: dict[str, str] = {
    "blobs.delete_prefix@usecases.expiry.sweep_expired": _DAYS,
    "store.commit@usecases.expiry.sweep_expired": _DAYS,
    "store.read@usecases.retention._remove": _DAYS,
    "store.commit@usecases.retention._remove": _DAYS,
    "store.find@usecases.retention._is_all_of_job": _DAYS,
    "blobs.delete_prefix@usecases.exports.see_to": _DAYS,
    "blobs.delete_prefix@usecases.inputs.remove_expired": _DAYS,
    "store.commit@usecases.inputs.remove_expired": _DAYS,
    "store.find@usecases.feeds._trim": "only after hundreds of events of one caller",
    "store.commit@usecases.feeds._trim": "only after thousands of events of one caller",
    "store.commit@usecases.export_walk.Walk._beat": "only in an export that takes long",
    "blobs.delete_prefix@usecases.exports._make": _RACE,
    "blobs.delete_prefix@usecases.inputs.take": _RACE,
    "store.read@usecases.feeds._still_unplaced": _RACE,
    "store.read@usecases.idempotency._keep": _RACE,
    "store.read@usecases.jobs._admit": _RACE,
    "store.read@usecases.open_jobs._admit": _RACE,
    "store.read@usecases.reruns._start": _RACE,
    "store.commit@usecases.notices.prepare": _RACE,
    "store.commit@usecases.exports._recorded": _OUTAGE,
    "store.commit@usecases.idempotency.once": _OUTAGE,
    "store.commit@usecases.ingest.give_up": _OUTAGE,
    "store.read@usecases.ingest.give_up": _OUTAGE,
    "store.commit@usecases.reconcile.finish_batch": _OUTAGE,
    "store.commit@usecases.runs.fail": _OUTAGE,
    "store.commit@usecases.notices.postpone": "only when many receivers are slow at once",
    "store.commit@usecases.notices._has_its_turn": "only when an earlier event of the run waits",
    "queue.close_run@usecases.runs.reopen_queue": _RACE,
    "queue.send@usecases.reconcile._resend": "only when messages are lost; here they are rows",
    "queue.bounce@actors.intake.refuse": "only in a measurement, with the gate taken away",
    "queue.bounce@actors.doorkeeper.Doorkeeper._bounce": "only when the parking lot is full",
    "queue.extend@actors.parking.ParkingLot.keep_forever": "only when a task is parked for long",
    "blobs.delete_prefix@usecases.long_lists.drop_unless_used": _RACE,
    "store.commit@usecases.ingest.walk": "only when a list is taken up after its run has ended",
    "coordinator.count@usecases.budgets.is_spent": _CHARGES,
    "queue.bounce@actors.run_poller.RunPoller._send_back": _CHARGES,
    "store.read@usecases.budgets._active": _CHARGES,
    "coordinator.count@actors.shared_signals.SharedSignals._count": _AWS,
    "queue.close_run@usecases.reconcile._close_queue": _MINUTE,
    "store.commit@usecases.reconcile._close_queue": _MINUTE,
    "store.commit@usecases.clock_repairs.pull_back": _CLOCK,
    "store.commit@usecases.clock_repairs.realign_schedules": _CLOCK,
    "store.find@usecases.overview.live_runs": _LOOK,
}


def reason_for(site: str, side: str) -> str | None:
    """Why nothing dies there; None if something should."""
    return UNREACHED.get(site) or UNREACHED.get(f"{side}:{site}")
