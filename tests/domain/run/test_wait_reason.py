"""Why a run waits: one main cause, the nearest first, and no guesses."""

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
    """Ten tasks, of which nothing is done yet, and a worker that has seen nothing special."""
    known: dict[str, Any] = {
        "totals": Totals(admitted=10),
        "inflight": 0,
        "cap": 4,
        "workers": (WORKER,),
        **fields,
    }
    return RunFacts(run=a_run(**{"planned": 10, "total": 10, **(run or {})}), **known)


def seen(reason: WaitReason, since: float = T0) -> tuple[RunReport, ...]:
    return (RunReport(reason, since),)


PAUSED = {"pause_state": PauseState.PAUSED}

CAUSES = [
    (facts(run=PAUSED, workers=()), WaitReason.PAUSED),
    (facts(run={"open_batches": 1}, totals=Totals(), workers=()), WaitReason.INGEST),
    (facts(reports=seen(WaitReason.BUDGET), inflight=4), WaitReason.BUDGET),
    (facts(workers=()), WaitReason.NO_WORKERS),
    (facts(reports=seen(WaitReason.STORAGE), inflight=4), WaitReason.STORAGE),
    (facts(reports=seen(WaitReason.RESOURCES), inflight=4), WaitReason.RESOURCES),
    (
        facts(
            totals=Totals(admitted=10, done=7, retrying=3),
            reports=seen(WaitReason.GATEWAY_UNAVAILABLE),
        ),
        WaitReason.GATEWAY_UNAVAILABLE,
    ),
    (facts(inflight=4, reports=seen(WaitReason.GATEWAY_LIMIT)), WaitReason.JOB_CAP),
    (facts(inflight=3, reports=seen(WaitReason.GATEWAY_LIMIT)), WaitReason.GATEWAY_LIMIT),
    (facts(inflight=4, reports=seen(WaitReason.HOST_CAP)), WaitReason.JOB_CAP),
    (facts(reports=seen(WaitReason.HOST_CAP)), WaitReason.HOST_CAP),
    (facts(totals=Totals(admitted=10, done=7, retrying=3)), WaitReason.RETRY_BACKOFF),
    (
        facts(
            totals=Totals(admitted=10, done=7, retrying=3),
            reports=seen(WaitReason.RATE_LIMITED),
        ),
        WaitReason.RATE_LIMITED,
    ),
    (facts(reports=seen(WaitReason.WORKERS_BUSY), inflight=1), WaitReason.WORKERS_BUSY),
]


@pytest.mark.parametrize(("known", "reason"), CAUSES, ids=[cause for _, cause in CAUSES])
def test_the_nearest_cause_is_the_one_that_is_told(known: RunFacts, reason: WaitReason) -> None:
    explanation = explain(known)

    assert explanation is not None
    assert explanation.reason is reason
    assert explanation.detail


def test_every_cause_can_be_told() -> None:
    assert {reason for _, reason in CAUSES} == set(WaitReason)


@pytest.mark.parametrize(
    "known",
    [
        facts(inflight=2),
        facts(inflight=10, cap=10),
        facts(totals=Totals(admitted=10, done=10)),
        facts(run={"status": RunStatus.STOPPED, **PAUSED}),
        facts(run={"stop_requested_at": T0, **PAUSED}),
        facts(reports=seen(WaitReason.RETRY_BACKOFF)),
        facts(reports=seen(WaitReason.RATE_LIMITED), totals=Totals(admitted=10, retrying=2)),
    ],
    ids=["moving", "all in flight", "done", "over", "stopping", "others ready", "some ready"],
)
def test_a_run_that_moves_or_is_over_waits_for_nothing(known: RunFacts) -> None:
    assert explain(known) is None


def test_a_cause_holds_since_whoever_saw_it_first() -> None:
    explanation = explain(
        facts(
            inflight=4,
            reports=(
                *seen(WaitReason.JOB_CAP, T0 + 5),
                *seen(WaitReason.JOB_CAP, T0 + 2),
                *seen(WaitReason.WORKERS_BUSY, T0),
            ),
        )
    )

    assert explanation is not None
    assert (explanation.since, explanation.detail) == (T0 + 2, "4 of 4 in flight")


def test_the_time_left_follows_from_what_ended_lately_everywhere() -> None:
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
def test_a_time_that_nobody_can_know_is_not_told(known: RunFacts) -> None:
    assert eta_s(known) is None


def test_slots_that_are_kept_for_others_do_not_count_as_usable() -> None:
    worker = WorkerReport(capacity=300, inflight=200, usable=200)
    waiting = explain(facts(reports=seen(WaitReason.WORKERS_BUSY), workers=(worker,)))

    assert waiting is not None
    assert waiting.detail == "other runs use 200 of 200 slots"


def test_a_worker_of_an_earlier_release_reports_all_its_slots() -> None:
    assert WorkerReport(50, 10).usable_slots == 50
    assert WorkerReport(300, 210, usable=200).usable_slots == 210


def test_a_run_without_a_budget_left_has_no_estimated_end() -> None:
    report = RunReport(WaitReason.BUDGET, T0, rate=0.01)

    assert eta_s(facts(reports=(report,))) is None
