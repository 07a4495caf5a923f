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
    bodies,
    claims,
    cursors,
    deletes,
    execution,
    exports,
    fetches,
    ingest,
    keys,
    leases,
    lines,
    notices,
    outbox,
    problems,
    reads,
    reruns,
    secrets,
    shown,
    spared,
    tenancy,
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
        claims.a_live_claim_is_left_alone,
        claims.an_end_is_that_of_its_claim,
        execution.a_success_has_its_body,
        accounting.counters_equal_rows,
        accounting.counters_never_fall,
        accounting.a_completed_run_is_complete,
        accounting.an_ended_run_never_changes,
        accounting.nothing_settles_after_a_stop,
        accounting.at_most_one_live_run,
        accounting.jobs_only_go_forward,
        leases.leases_stay_within_the_cap,
        leases.a_lease_is_given_back_by_its_holder,
        deletes.no_row_rises_from_the_dead,
        exports.an_export_shows_all_that_ended,
        outbox.an_end_is_told_with_the_flip,
        spared.no_export_is_made_twice,
        spared.an_end_is_noticed_at_once,
    ),
    on_ack=(execution.only_what_is_over_is_acked,),
    on_answer=(
        acceptance.an_accepted_job_is_durable,
        acceptance.one_key_makes_one_thing,
        acceptance.a_used_key_takes_no_other_request,
        deletes.a_deleted_job_is_not_found,
        tenancy.nobody_sees_what_is_anothers,
        tenancy.what_is_anothers_is_not_found,
        tenancy.a_key_is_its_callers_own,
        cursors.a_cursor_fits_its_own_list,
        shown.a_run_at_work_is_not_idle,
        shown.what_was_accepted_is_found,
        reruns.what_was_accepted_can_be_run_again,
        problems.every_refusal_is_a_problem,
        problems.no_request_is_our_fault,
        secrets.no_secret_is_shown,
    ),
    on_fetch=(
        fetches.no_fetch_without_a_claim,
        fetches.no_job_is_fetched_beyond_its_cap,
        execution.who_loses_its_workers_is_given_up,
        deletes.a_stopped_run_is_left_alone,
        spared.no_page_is_fetched_twice_at_once,
    ),
    on_delivery=(
        notices.one_event_is_one_message,
        notices.no_event_before_its_end,
        outbox.a_message_has_the_name_of_its_event,
        secrets.no_secret_is_told,
    ),
    at_the_end=(
        acceptance.no_task_is_lost,
        acceptance.a_promise_is_kept_or_withdrawn,
        lines.every_line_is_its_task,
        lines.a_bad_line_is_a_failed_task,
        fetches.a_claim_fetches_once,
        fetches.every_fetch_is_an_attempt,
        leases.dead_processes_hold_nothing,
        deletes.nothing_is_left_of_a_deleted_job,
        shown.an_end_that_was_shown_stays,
        shown.counts_that_were_shown_never_fall,
        reads.pages_show_each_task_once,
        reruns.a_rerun_has_every_line,
        notices.every_event_is_told_or_given_up,
        outbox.nothing_is_given_up_early,
        bodies.every_success_keeps_its_body,
        exports.exports_are_there_while_they_live,
        keys.every_key_gets_its_answer,
        keys.what_was_made_belongs_to_its_key,
        notices.every_signature_verifies,
        secrets.no_secret_is_stored,
        secrets.no_secret_is_logged,
    ),
)
