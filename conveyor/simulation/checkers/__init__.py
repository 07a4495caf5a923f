"""Checkers: one small function an invariant of SPEC 6.14, named as its sentence.

To add one: write a generator of sentences about what is wrong, in the file of its group, and list
it below. `on_write` checkers get a Moment after each write that changed a row: the rows before
and after, and what changed, so that they need look at little; `at_the_end` ones get it once, when
faults are long over. The others get the event as well: the messages that are about to be acked, a
client's call that was answered, a fetch that begins, a delivery that came in. A checker writes
nothing, draws no random number and awaits nothing.
"""

from __future__ import annotations

from conveyor.simulation.checkers import (
    acceptance,
    accounting,
    deletes,
    execution,
    ingest,
    leases,
    notices,
    reads,
)
from conveyor.simulation.watcher import Checkers

ALL = Checkers(
    on_write=(
        ingest.a_line_is_one_task,
        ingest.ingest_only_inserts,
        ingest.totals_are_sums_of_sealed_lists,
        ingest.a_sealed_list_is_all_there,
        execution.tasks_change_as_they_may,
        execution.claims_only_grow,
        execution.attempts_are_bounded,
        execution.a_success_has_its_body,
        accounting.counters_equal_rows,
        accounting.counters_never_fall,
        accounting.a_completed_run_is_complete,
        accounting.an_ended_run_never_changes,
        accounting.at_most_one_live_run,
        accounting.jobs_only_go_forward,
        leases.leases_stay_within_the_cap,
        deletes.no_row_rises_from_the_dead,
    ),
    on_ack=(execution.only_what_is_over_is_acked,),
    on_answer=(
        acceptance.an_accepted_job_is_durable,
        acceptance.one_key_makes_one_thing,
        acceptance.a_used_key_takes_no_other_request,
        deletes.a_deleted_job_is_not_found,
    ),
    on_fetch=(deletes.a_stopped_run_is_left_alone,),
    on_delivery=(notices.one_event_is_one_message, notices.no_event_before_its_end),
    at_the_end=(
        acceptance.no_task_is_lost,
        acceptance.a_promise_is_kept_or_withdrawn,
        leases.dead_processes_hold_nothing,
        deletes.nothing_is_left_of_a_deleted_job,
        reads.pages_show_each_task_once,
        notices.every_event_is_told_or_given_up,
        notices.every_signature_verifies,
    ),
)
