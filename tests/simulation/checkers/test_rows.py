"""Tests the checkers of rows: tasks, counters, deleted jobs, leases (I8 to I34)."""

from __future__ import annotations

from conveyor.domain.ids import TaskId
from conveyor.domain.model import JobStatus, RunStatus, TaskStatus
from conveyor.simulation.backends.snapshot import Lease, idle_runs
from conveyor.simulation.backends.storage_dump import StoredItem
from conveyor.simulation.checkers.accounting import (
    counters_equal_rows,
    counters_never_fall,
    no_change_stays_half_written,
    the_series_adds_up_to_the_counters,
)
from conveyor.simulation.checkers.deletes import (
    no_row_appears_under_a_deleted_job,
    nothing_refers_to_what_was_deleted,
)
from conveyor.simulation.checkers.execution import (
    an_idle_run_is_found,
    attempts_are_bounded,
    tasks_make_only_legal_transitions,
)
from conveyor.simulation.checkers.ingest import a_line_is_one_task, ingest_only_inserts
from conveyor.simulation.checkers.limits.leases import (
    an_ended_run_holds_nothing,
    dead_processes_hold_nothing,
)
from conveyor.simulation.client_history import History
from tests.builders import (
    JOB,
    RUN,
    T0,
    a_batch,
    a_crossing,
    a_job,
    a_run,
    a_sample,
    a_stats,
    a_task,
)
from tests.simulation.checkers.state_changes import a_snapshot, change_to

TASK = a_task()
HELD = a_task(status=TaskStatus.PROCESSING, claim=1)
ENDED = a_task(status=TaskStatus.SUCCESSFUL, claim=1, attempts=1)


def test_a_line_with_two_tasks_is_reported() -> None:
    assert list(a_line_is_one_task(change_to(TASK, a_task(task_id=TaskId("twin")))))
    assert list(a_line_is_one_task(change_to(TASK, a_task(1)))) == []


def test_a_task_whose_url_changes_is_reported() -> None:
    other = a_task(url="https://example.com/other")

    assert list(ingest_only_inserts(change_to(other, before=[TASK])))
    assert list(ingest_only_inserts(change_to(HELD, before=[TASK]))) == []


def test_a_claimed_task_that_is_overwritten_by_ingest_is_reported() -> None:
    assert list(ingest_only_inserts(change_to(TASK, before=[HELD])))


def test_a_task_that_ends_unclaimed_or_changes_after_its_end_is_reported() -> None:
    unclaimed = a_task(status=TaskStatus.SUCCESSFUL)
    again = a_task(status=TaskStatus.PENDING, claim=1, attempts=1)

    assert list(tasks_make_only_legal_transitions(change_to(unclaimed, before=[TASK])))
    assert list(tasks_make_only_legal_transitions(change_to(again, before=[ENDED])))
    assert list(tasks_make_only_legal_transitions(change_to(ENDED, before=[HELD]))) == []


def test_a_task_with_too_many_attempts_is_reported() -> None:
    rows = (a_job(max_attempts=2), a_run())
    allowed, beyond = (
        a_task(status=TaskStatus.PENDING, claim=count, attempts=count) for count in (2, 4)
    )

    assert list(attempts_are_bounded(change_to(*rows, allowed, before=[TASK]))) == []
    assert list(attempts_are_bounded(change_to(*rows, beyond, before=[TASK])))


def test_a_change_that_stays_half_written_is_reported() -> None:
    assert list(no_change_stays_half_written(change_to(a_job(), a_crossing())))
    assert list(no_change_stays_half_written(change_to(a_job()))) == []


def test_a_counter_that_falls_or_exceeds_the_admitted_tasks_is_reported() -> None:
    one, two = (a_stats(admitted=2, done=done, successful=done) for done in (1, 2))

    rows = (a_job(), a_run())

    assert list(counters_never_fall(change_to(*rows, two, before=[one]))) == []
    assert list(counters_never_fall(change_to(*rows, one, before=[two])))
    assert list(counters_never_fall(change_to(*rows, a_stats(admitted=2, done=3), before=[two])))


def test_ended_tasks_may_be_counted_in_any_shard_of_their_run() -> None:
    rows = (a_job(), a_run(shard_count=2), ENDED)
    own, other = (a_stats(0, admitted=1), a_stats(1, done=1, successful=1))
    uncounted = a_stats(1)

    assert list(counters_equal_rows(change_to(*rows, own, other, before=[own]))) == []
    assert list(counters_never_fall(change_to(*rows, own, other, before=[own]))) == []
    assert list(counters_equal_rows(change_to(*rows, own, uncounted, before=[own])))
    assert list(counters_equal_rows(change_to(*rows, a_stats(0), other, before=[own])))


def test_a_sample_that_exceeds_the_counters_is_reported() -> None:
    rows = (a_job(), a_run(), a_stats(admitted=3, done=2, successful=1, failed=1, timeout=1))
    true, false = (
        a_sample(1, at=T0 + 60, successful=count, reasons={"timeout": 1}) for count in (1, 2)
    )

    assert list(the_series_adds_up_to_the_counters(change_to(*rows, true, before=rows))) == []
    assert list(the_series_adds_up_to_the_counters(change_to(*rows, false, before=rows)))


def test_a_row_that_appears_under_a_deleted_job_is_reported() -> None:
    deleted = (a_job(status=JobStatus.DELETED), a_run())
    standing = (a_job(), a_run())

    assert list(no_row_appears_under_a_deleted_job(change_to(*deleted, a_batch(), before=deleted)))
    assert list(no_row_appears_under_a_deleted_job(change_to(*deleted, TASK, before=deleted)))
    assert (
        list(no_row_appears_under_a_deleted_job(change_to(*standing, a_batch(), before=standing)))
        == []
    )


def test_an_ingest_step_may_leave_tasks_on_an_engine_that_writes_rows_first() -> None:
    rows = (a_job(status=JobStatus.DELETED), a_run())
    change = change_to(*rows, TASK, before=rows, rows_come_first=True)

    assert list(no_row_appears_under_a_deleted_job(change)) == []


def test_queues_messages_and_marks_of_a_deleted_job_are_reported() -> None:
    deleted, standing = a_job(status=JobStatus.DELETED), (a_job(), a_run())
    ref = f"ref of {JOB}".encode()
    left = (StoredItem("queue", RUN), StoredItem("message", "any", ref), StoredItem("mark", JOB))

    for leftover in left:
        assert list(nothing_refers_to_what_was_deleted(change_to(deleted, stored_items=[leftover])))
    assert list(nothing_refers_to_what_was_deleted(change_to(*standing, stored_items=left))) == []


def test_messages_on_the_dead_letter_queue_and_owner_marks_may_stay() -> None:
    row = (
        StoredItem("queue", "control-dead"),
        StoredItem("message", "control-dead", JOB.encode()),
        StoredItem("mark", f"{{{RUN}}}/:job", JOB.encode()),
    )
    change = change_to(a_job(status=JobStatus.DELETED), stored_items=row)

    assert list(nothing_refers_to_what_was_deleted(change)) == []


def test_a_lease_that_exists_at_the_end_is_reported() -> None:
    lease = Lease(JOB, RUN, expires_at=0.0)

    assert list(dead_processes_hold_nothing(change_to(leases=[lease])))
    assert list(dead_processes_hold_nothing(change_to())) == []


def test_a_lease_from_a_clock_ahead_may_stay_if_no_worker_counts_it() -> None:
    month_s = 30 * 24 * 3600.0
    row, real = (Lease(JOB, RUN, T0 + ahead_s, "pool#0#a") for ahead_s in (month_s, 100.0))
    by_a_common_clock = Lease(JOB, RUN, T0 + month_s)

    assert list(dead_processes_hold_nothing(change_to(leases=[row]))) == []
    assert list(dead_processes_hold_nothing(change_to(leases=[row, real])))
    assert list(dead_processes_hold_nothing(change_to(leases=[by_a_common_clock])))


def test_a_lease_held_long_after_the_end_of_its_run_is_reported() -> None:
    lease = Lease(JOB, RUN, expires_at=T0 + 20.0)
    long_ended, just_ended = (
        a_run(status=RunStatus.COMPLETED, ended_at=T0 - ago_s) for ago_s in (150.0, 5.0)
    )

    assert list(an_ended_run_holds_nothing(change_to(long_ended, leases=[lease])))
    for run in (just_ended, a_run()):
        assert list(an_ended_run_holds_nothing(change_to(run, leases=[lease]))) == []


def test_a_worker_that_learns_late_of_the_end_may_acquire_a_lease_once() -> None:
    run = a_run(ended_at=T0 - 150.0)
    new, renewed = (Lease(JOB, RUN, expires_at=T0 + left_s) for left_s in (29.99, 25.0))

    assert list(an_ended_run_holds_nothing(change_to(run, leases=[new]))) == []
    assert list(an_ended_run_holds_nothing(change_to(run, leases=[renewed])))


def test_a_lease_may_be_held_for_a_while_after_the_faults_have_ended() -> None:
    lease, run = Lease(JOB, RUN, expires_at=T0 + 20.0), a_run(ended_at=T0 - 500.0)
    lately, long_ago = (History(calm_since=T0 - ago_s) for ago_s in (5.0, 150.0))

    assert list(an_ended_run_holds_nothing(change_to(run, leases=[lease], history=long_ago)))
    assert list(an_ended_run_holds_nothing(change_to(run, leases=[lease], history=lately))) == []


def test_a_process_whose_clock_was_stepped_may_hold_a_lease_longer() -> None:
    lease, run = Lease(JOB, RUN, expires_at=T0 + 20.0), a_run(ended_at=T0 - 150.0)
    change = change_to(run, leases=[lease], history=History(steps_clocks=True))

    assert list(an_ended_run_holds_nothing(change)) == []


def test_a_run_that_stays_idle_too_long_is_reported() -> None:
    since = {"long": -500.0, "short": -50.0}
    histories = [History(idle_since={RUN: at}, sweep_s=15.0) for at in since.values()]

    verdicts = [
        bool(list(an_idle_run_is_found(change_to(history=history)))) for history in histories
    ]
    assert verdicts == [True, False]


def test_a_run_with_tasks_but_no_message_and_no_claim_is_idle() -> None:
    claimed = a_task(status=TaskStatus.PROCESSING, claim=1, claim_until=T0 + 90.0)
    lapsed = a_task(status=TaskStatus.PROCESSING, claim=1, claim_until=T0 - 1.0)
    stopping, awaiting = a_run(stop_requested_at=T0), a_run(open_batches=1)

    for task in (TASK, lapsed):
        assert idle_runs(a_snapshot(a_run(), task), {}) == [RUN]
        assert idle_runs(a_snapshot(a_run(), task), {RUN: 1}) == []
        for run in (stopping, awaiting, a_run(status=RunStatus.COMPLETED)):
            assert idle_runs(a_snapshot(run, task), {}) == []
    assert idle_runs(a_snapshot(a_run(), claimed), {}) == []
    assert idle_runs(a_snapshot(a_run(), ENDED), {}) == []


def test_the_idle_time_of_a_run_counts_from_its_first_observation() -> None:
    history = History()
    for run_ids, at in ((["A"], 1.0), (["A", "B"], 2.0), (["B"], 3.0), (["A", "B"], 4.0)):
        history.note_idle(run_ids, at)

    assert history.idle_since == {"A": 4.0, "B": 2.0}
