"""Why a run waits: one main cause, the most specific first, and an estimate only where one is
possible."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain.model import PauseState, RunStatus, Totals
from conveyor.domain.run.wait_reason import (
    RunFacts,
    RunReport,
    WaitReason,
    WorkerReport,
    eta_s,
    explain,
)
from tests.builders import T0, a_run

WORKER = WorkerReport(capacity=50, inflight=10)


def facts(*, run: dict[str, Any] | None = None, **fields: Any) -> RunFacts:
    """Ten unfinished tasks, and a worker without anything to report."""
    known: dict[str, Any] = {
        "totals": Totals(admitted=10),
        "inflight": 0,
        "cap": 4,
        "workers": (WORKER,),
        **fields,
    }
    return RunFacts(run=a_run(**{"planned": 10, "total": 10, **(run or {})}), **known)


def reports_of(reason: WaitReason, since: float = T0) -> tuple[RunReport, ...]:
    return (RunReport(reason, since),)


PAUSED = {"pause_state": PauseState.PAUSED}

CAUSES = [
    (facts(run=PAUSED, workers=()), WaitReason.PAUSED),
    (facts(run={"open_batches": 1}, totals=Totals(), workers=()), WaitReason.INGEST),
    (facts(reports=reports_of(WaitReason.BUDGET), inflight=4), WaitReason.BUDGET),
    (facts(workers=()), WaitReason.NO_WORKERS),
    (facts(reports=reports_of(WaitReason.STORAGE), inflight=4), WaitReason.STORAGE),
    (facts(reports=reports_of(WaitReason.RESOURCES), inflight=4), WaitReason.RESOURCES),
    (
        facts(
            totals=Totals(admitted=10, done=7, retrying=3),
            reports=reports_of(WaitReason.GATEWAY_UNAVAILABLE),
        ),
        WaitReason.GATEWAY_UNAVAILABLE,
    ),
    (facts(inflight=4, reports=reports_of(WaitReason.GATEWAY_LIMIT)), WaitReason.JOB_CAP),
    (facts(inflight=3, reports=reports_of(WaitReason.GATEWAY_LIMIT)), WaitReason.GATEWAY_LIMIT),
    (facts(inflight=4, reports=reports_of(WaitReason.HOST_CAP)), WaitReason.JOB_CAP),
    (facts(reports=reports_of(WaitReason.HOST_CAP)), WaitReason.HOST_CAP),
    (facts(totals=Totals(admitted=10, done=7, retrying=3)), WaitReason.RETRY_BACKOFF),
    (
        facts(
            totals=Totals(admitted=10, done=7, retrying=3),
            reports=reports_of(WaitReason.RATE_LIMITED),
        ),
        WaitReason.RATE_LIMITED,
    ),
    (facts(reports=reports_of(WaitReason.WORKERS_BUSY), inflight=1), WaitReason.WORKERS_BUSY),
]


@pytest.mark.parametrize(("known", "reason"), CAUSES, ids=[cause for _, cause in CAUSES])
def test_the_first_cause_that_applies_is_the_reason(known: RunFacts, reason: WaitReason) -> None:
    explanation = explain(known)

    assert explanation is not None
    assert explanation.reason is reason
    assert explanation.detail


def test_every_wait_reason_is_covered_by_a_case() -> None:
    assert {reason for _, reason in CAUSES} == set(WaitReason)


@pytest.mark.parametrize(
    "known",
    [
        facts(inflight=2),
        facts(inflight=10, cap=10),
        facts(totals=Totals(admitted=10, done=10)),
        facts(run={"status": RunStatus.STOPPED, **PAUSED}),
        facts(run={"stop_requested_at": T0, **PAUSED}),
        facts(reports=reports_of(WaitReason.RETRY_BACKOFF)),
        facts(reports=reports_of(WaitReason.RATE_LIMITED), totals=Totals(admitted=10, retrying=2)),
    ],
    ids=["moving", "all in flight", "done", "over", "stopping", "others ready", "some ready"],
)
def test_a_run_that_makes_progress_or_has_ended_has_no_wait_reason(known: RunFacts) -> None:
    assert explain(known) is None


def test_a_cause_holds_since_the_earliest_report_of_it() -> None:
    explanation = explain(
        facts(
            inflight=4,
            reports=(
                *reports_of(WaitReason.JOB_CAP, T0 + 5),
                *reports_of(WaitReason.JOB_CAP, T0 + 2),
                *reports_of(WaitReason.WORKERS_BUSY, T0),
            ),
        )
    )

    assert explanation is not None
    assert (explanation.since, explanation.detail) == (T0 + 2, "4 of 4 in flight")


def test_the_estimated_time_left_uses_the_rates_of_all_workers() -> None:
    rates = (RunReport(rate=0.5), RunReport(rate=1.5))

    assert eta_s(facts(reports=rates, totals=Totals(admitted=10, done=4))) == 3.0


@pytest.mark.parametrize(
    "known",
    [
        facts(),
        facts(reports=(RunReport(rate=0.0),)),
        facts(reports=(RunReport(rate=2.0),), run=PAUSED),
        facts(reports=(RunReport(rate=2.0),), run={"status": RunStatus.COMPLETED}),
        facts(reports=(RunReport(rate=2.0),), totals=Totals(admitted=10, done=10)),
    ],
    ids=["unseen", "standing still", "paused", "over", "nothing left"],
)
def test_no_time_left_is_estimated_without_progress_or_remaining_tasks(known: RunFacts) -> None:
    assert eta_s(known) is None


def test_slots_reserved_for_other_runs_do_not_count_as_usable() -> None:
    worker = WorkerReport(capacity=300, inflight=200, usable=200)
    waiting = explain(facts(reports=reports_of(WaitReason.WORKERS_BUSY), workers=(worker,)))

    assert waiting is not None
    assert waiting.detail == "other runs use 200 of 200 slots"


def test_a_worker_of_an_earlier_release_reports_all_its_slots() -> None:
    assert WorkerReport(50, 10).usable_slots == 50
    assert WorkerReport(300, 210, usable=200).usable_slots == 210


def test_a_run_with_an_exhausted_budget_has_no_estimated_end() -> None:
    report = RunReport(WaitReason.BUDGET, T0, rate=0.01)

    assert eta_s(facts(reports=(report,))) is None
