"""Tests the summary of a trace: it is short, and contains what led to a failure."""

from __future__ import annotations

from msgspec.structs import replace

from conveyor.simulation.models.fault_rates import CallFaults
from conveyor.simulation.options import draw
from conveyor.simulation.simulator import simulate
from conveyor.simulation.trace.summary import DISTURBED_MAX, NAMED_MAX, summarize_failure
from conveyor.simulation.trace.trace import Line

RUN = "01HF7YAT002XS0WYH6KZCNQBY8"
WRONG = f"run {RUN} broke it"


def commit(at: float, detail: str = RUN) -> Line:
    return Line(at, "worker0", "store.commit", detail, is_minor=False)


def test_faults_of_processes_clocks_and_engines_are_in_the_summary_in_order() -> None:
    lines = [
        commit(1.0),
        Line(2.0, "worker0", "killed", "killed_after", is_minor=False),
        Line(3.0, "chaos", "outage", "", is_minor=False),
        commit(3.5, "another run"),
        Line(4.0, "api0", "clock stepped", "-3.000", is_minor=False),
        commit(5.0),
    ]

    times = [line.at for line in summarize_failure(lines, [WRONG])]

    assert times == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_failed_minor_calls_are_in_the_summary() -> None:
    lines = [
        Line(1.0, "worker0", "store.read", "", is_minor=True),
        Line(2.0, "worker0", "store.read", "refused", is_minor=True, is_fault=True),
        commit(5.0),
    ]

    assert [line.at for line in summarize_failure(lines, [WRONG])] == [2.0, 5.0]


def test_faults_long_before_the_failure_are_left_out() -> None:
    lines = [
        Line(1.0, "worker0", "killed", "", is_minor=False),
        Line(2.0, "worker0", "store.read", "refused", is_minor=True, is_fault=True),
        commit(1000.0),
    ]

    assert [line.at for line in summarize_failure(lines, [WRONG])] == [1000.0]


def test_the_length_of_a_summary_is_bounded() -> None:
    lines = [
        line
        for at in range(1000)
        for line in (
            commit(5000.0 + at / 100),
            Line(5000.0 + at / 100, "worker0", "paused", "", is_minor=False),
            Line(5000.0 + at / 100, "worker0", "read", "", is_minor=True, is_fault=True),
        )
    ]

    assert len(summarize_failure(lines, [WRONG])) == NAMED_MAX + 2 * DISTURBED_MAX
    assert summarize_failure(lines, [WRONG])[-3:] == lines[-3:]


def test_refused_and_unanswered_calls_to_aws_are_in_the_trace() -> None:
    options = draw(0, engine="aws", hours=0.005)
    calls = CallFaults(refused_rate=0.1, lost_rate=0.1)
    options = replace(options, service_rates=replace(options.service_rates, calls=calls))

    failed = [line for line in simulate(options).lines if line.is_fault]

    assert any("slow down" in line.detail for line in failed)
    assert any("the connection closed" in line.detail for line in failed)
