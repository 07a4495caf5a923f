"""Tests `conveyor simulate`: its output and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from conveyor.cli import simulate as command
from conveyor.cli.simulate import lines_of, print_progress, simulate
from conveyor.simulation import suite
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.invariant_monitor import Violation
from conveyor.simulation.options import Options, draw
from conveyor.simulation.simulator import Report
from conveyor.simulation.suite import JUDGED_FROM, Summary
from conveyor.simulation.trace.trace import Line

RUN = "01HF7YAT002XS0WYH6KZCNQBY8"


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The outcome of the next simulation, which the test sets."""
    outcome: dict[str, Any] = {}

    def pretend(options: Options) -> Report:
        return Report(options=options, hash="abc", **outcome)

    monkeypatch.setattr(suite, "simulate", pretend)
    return outcome


def run(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, arguments)


def test_seed_options_and_replay_command_come_first(outcome: dict[str, Any]) -> None:
    result = run("--seed", "7")

    first, second = result.output.splitlines()[:2]
    assert first.startswith('seed 7: {"seed":7,')
    assert second.startswith("replay: conveyor simulate --seed 7 --engine ")
    assert result.exit_code == 0


def test_a_failing_seed_prints_its_options_and_replay_command_before_its_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = [
        Report(options=draw(3), hash="abc"),
        Report(
            options=draw(4),
            hash="abc",
            crashes=["an actor crashed"],
            lines=[Line(11.0, "worker0", "crashed", "", is_minor=False)],
        ),
    ]
    monkeypatch.setattr(command, "run_seeds", lambda *_, **__: iter(reports))

    lines = run("--from", "3", "--seeds", "2").output.splitlines()

    assert lines[0].startswith('seed 4: {"seed":4,')
    assert lines[1].startswith("replay: conveyor simulate --seed 4 --engine ")
    assert lines[2].rstrip().endswith("worker0      crashed")


def test_an_error_of_the_simulator_is_reported_as_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Options) -> Report:
        raise KeyError("nobody there")

    monkeypatch.setattr(suite, "simulate", fail)

    result = run("--seed", "7")

    assert result.exit_code == 127
    assert "the simulator itself failed" in result.output
    assert "KeyError: 'nobody there'" in result.output


def test_the_report_option_writes_totals_of_all_seeds(
    outcome: dict[str, Any], tmp_path: Path
) -> None:
    outcome.update(faults={"paused": 2}, crashes=["an actor crashed"], calls=4321, requests=65)

    run("--seed", "7", "--report", str(tmp_path / "report.md"))

    lines = (tmp_path / "report.md").read_text()
    assert "| paused | 2 |" in lines
    assert "| outage | 0 |" in lines
    assert "| calls of engines | 4,321 |" in lines
    assert "| requests of clients | 65 |" in lines
    assert "| seconds a seed | " in lines
    assert "| seeds that failed | 7 |" in lines


def test_a_report_of_many_seeds_names_the_faults_that_never_occurred() -> None:
    summary = Summary()
    all_but_one = {fault.value: 1 for fault in Fault if fault is not Fault.PAUSED}
    for seed in range(JUDGED_FROM):
        summary.add(Report(options=draw(seed, engine="memory"), hash="", faults=all_but_one))

    lines = [*lines_of(summary, range(JUDGED_FROM))]

    assert "Faults that never occurred: paused; optional ones: none." in lines


def test_the_last_line_is_json_with_the_json_option(outcome: dict[str, Any]) -> None:
    outcome.update(kills=3, faults={"paused": 2})

    lines = json.loads(run("--seed", "7", "--json").output.splitlines()[-1])

    assert set(lines) == {
        "seeds",
        "hash",
        "violations",
        "liveness_failures",
        "faults",
        "kills",
    }
    assert (lines["seeds"], lines["kills"], lines["faults"]) == (1, 3, {"paused": 2})


@pytest.mark.parametrize(
    ("values", "exit_code"),
    [
        ({}, 0),
        ({"crashes": ["dev: it broke"]}, 127),
        ({"liveness_failures": [f"run {RUN} never ended"]}, 128),
        ({"violations": [Violation("a_law", f"run {RUN} broke it", 1.0)]}, 129),
    ],
)
def test_exit_codes_distinguish_crashes_liveness_failures_and_violations(
    outcome: dict[str, Any], values: dict[str, Any], exit_code: int
) -> None:
    outcome.update(values)

    assert run("--seed", "7").exit_code == exit_code


def test_a_failure_is_printed_with_the_trace_of_the_rows_that_it_names(
    outcome: dict[str, Any],
) -> None:
    outcome["violations"] = [Violation("a_law", f"run {RUN} broke it", 12.5)]
    outcome["lines"] = [
        Line(11.0, "worker0", "store.commit", f"update Run({RUN})", is_minor=False),
        Line(11.5, "worker0", "store.commit", "update Run(another)", is_minor=False),
        Line(12.0, "worker1", "store.read", RUN, is_minor=True),
    ]

    lines = run("--seed", "7").output

    assert "11.0000  worker0" in lines
    assert "another" not in lines
    assert "worker1" not in lines
    assert f"a_law: run {RUN} broke it" in lines


def test_a_long_run_without_a_terminal_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = (Report(options=draw(seed, engine="memory"), hash="") for seed in range(120))

    assert len(list(print_progress(reports, 120))) == 120

    assert capsys.readouterr().err == "50 of 120 seeds, 0 failed\n100 of 120 seeds, 0 failed\n"
