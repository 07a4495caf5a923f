"""`conveyor simulate`: runs the simulator for one seed or many, prints failures and writes reports
(docs/simulator.md)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import track

from conveyor.simulation.options import ALL_ENGINES, Options, draw
from conveyor.simulation.simulator import Report
from conveyor.simulation.suite import JUDGED_FROM, OPTIONAL_FAULTS, Summary, run_seeds
from conveyor.simulation.trace.summary import summarize_failure

# After so many seeds the report is written again, so that an interrupted run leaves a recent one.
# Without a terminal, a line is printed.
REPORTED_EVERY = 50
CRASHED, NEVER_ENDED, VIOLATED, NEVER_OCCURRED = 127, 128, 129, 126


@click.command()
@click.option("--seed", type=click.IntRange(0), help="The one seed to run.")
@click.option("--seeds", type=click.IntRange(1), help="How many seeds to run.")
@click.option(
    "--from", "first", type=click.IntRange(0), default=0, help="The first of these seeds."
)
@click.option("--until-hours", type=float, help="How long faults last, in virtual hours.")
@click.option(
    "--engine", type=click.Choice(ALL_ENGINES), help="The engine; by default the seed draws one."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write the whole trace of one seed to this file.",
)
@click.option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    help="Write a summary of all seeds to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON, for scripts.")
def simulate(  # noqa: PLR0913, PLR0917 (one an option)
    seed: int | None,
    seeds: int | None,
    first: int,
    until_hours: float | None,
    engine: str | None,
    trace: Path | None,
    report_path: Path | None,
    as_json: bool,
) -> None:
    """Run the real program in virtual time, from a seed, with injected faults, and check its
    invariants.

    Exits with 129 if an invariant was violated, 128 if something never ended, 127 if the program
    crashed, and 126 if some fault never occurred in many seeds.
    """
    if seed is not None and seeds is not None:
        raise click.UsageError("Give --seed or --seeds.")
    start = first if seed is None else seed
    seed_range = range(start, start + (seeds or 1))
    if len(seed_range) == 1:
        _print_options(draw(seed_range[0], engine=engine, hours=until_hours), until_hours)
    summary = Summary()
    reports = run_seeds(seed_range, engine=engine, hours=until_hours)
    for report in _show_progress(reports, len(seed_range)):
        summary.add(report)
        if not report.has_passed:
            if len(seed_range) > 1:
                _print_options(report.options, until_hours, err=True)
            print_failure(report, _replay(report.options, until_hours))
        if trace is not None and len(seed_range) == 1:
            trace.write_text("".join(f"{line}\n" for line in report.lines), encoding="utf-8")
        if report_path is not None and (
            summary.seeds % REPORTED_EVERY == 0 or summary.seeds == len(seed_range)
        ):
            write_report(report_path, summary, seed_range)
    _print_summary(summary)
    if as_json:
        click.echo(_in_json(summary))
    sys.exit(_exit_code(summary))


def _show_progress(reports: Iterator[Report], count: int) -> Iterator[Report]:
    if count == 1:
        return reports
    console = Console(stderr=True)
    if console.is_terminal:
        return iter(track(reports, "Seeds", total=count, console=console))
    return print_progress(reports, count)


def print_progress(reports: Iterator[Report], count: int) -> Iterator[Report]:
    """Prints a line now and then: 2,000 seeds take an hour."""
    failed = 0
    for number, report in enumerate(reports, start=1):
        failed += not report.has_passed
        if number % REPORTED_EVERY == 0:
            click.echo(f"{number:,} of {count:,} seeds, {failed:,} failed", err=True)
        yield report


def _print_options(options: Options, hours: float | None, *, err: bool = False) -> None:
    click.echo(f"seed {options.seed}: {msgspec.json.encode(options).decode()}", err=err)
    click.echo(f"replay: {_replay(options, hours)}", err=err)


def _replay(options: Options, hours: float | None) -> str:
    more = "" if hours is None else f" --until-hours {hours:g}"
    return f"conveyor simulate --seed {options.seed} --engine {options.engine}{more}"


def print_failure(report: Report, replay: str) -> None:
    """Prints the trace lines of what the failures name, then the failures themselves."""
    failures = [f"{violation.checker}: {violation.sentence}" for violation in report.violations]
    failures += report.liveness_failures + report.crashes
    for line in summarize_failure(report.lines, failures):
        click.echo(str(line), err=True)
    click.echo(f"seed {report.options.seed} failed: {replay}", err=True)
    for failure in failures:
        click.echo(f"  {failure}", err=True)


def _print_summary(summary: Summary) -> None:
    click.echo(
        f"{summary.seeds} seeds, {summary.virtual_s / 3600:.1f} virtual hours, "
        f"{summary.kills} kills, {sum(summary.faults.values())} faults: "
        f"{summary.violations} violations, {summary.liveness_failures} liveness failures, "
        f"{summary.crashes} crashes; hash {summary.hash}"
    )
    for fault in summary.never_occurred():
        click.echo(f"fault never occurred: {fault}", err=True)


def _in_json(summary: Summary) -> str:
    return json.dumps(
        {
            "seeds": summary.seeds,
            "hash": summary.hash,
            "violations": summary.violations,
            "liveness_failures": summary.liveness_failures,
            "faults": dict(summary.faults),
            "kills": summary.kills,
        }
    )


def exit_code_of(report: Report) -> int:
    summary = Summary()
    summary.add(report)
    return _exit_code(summary)


def _exit_code(summary: Summary) -> int:
    if summary.violations:
        return VIOLATED
    if summary.liveness_failures:
        return NEVER_ENDED
    if summary.crashes:
        return CRASHED
    return NEVER_OCCURRED if summary.never_occurred() else 0


# The report of many seeds, as a Markdown page: `conveyor simulate --report FILE`
# (docs/simulator.md).


def write_report(path: Path, summary: Summary, seeds: range) -> None:
    path.write_text("".join(f"{line}\n" for line in lines_of(summary, seeds)), encoding="utf-8")


def lines_of(summary: Summary, seeds: range) -> Iterator[str]:
    done = seeds[: summary.seeds]
    yield "# The program in simulated worlds"
    yield ""
    yield f"`conveyor simulate --from {seeds.start} --seeds {len(done)}`"
    yield ""
    engines = ", ".join(f"{count:,} {name}" for name, count in sorted(summary.engines.items()))
    yield from _table(
        ("", ""),
        {
            "seeds": f"{summary.seeds:,} ({engines})",
            "virtual hours": f"{summary.virtual_s / 3600:,.0f}",
            "seconds a seed": f"{summary.took_s / max(summary.seeds, 1):.1f} (of one core)",
            "requests of clients": f"{summary.requests:,}",
            "calls of engines": f"{summary.calls:,}",
            "processes killed": f"{summary.kills:,}",
            "faults": f"{sum(summary.faults.values()):,}",
            "invariants violated": f"{summary.violations:,}",
            "runs that never ended": f"{summary.liveness_failures:,}",
            "crashes": f"{summary.crashes:,}",
            "seeds that failed": ", ".join(map(str, summary.failed)) or "none",
            "hash": f"`{summary.hash}`",
        }
        | {f"hash of the first {count:,}": f"`{mark}`" for count, mark in summary.marks.items()},
    )
    yield ""
    yield _never_occurred(summary)
    yield ""
    names = sorted({*summary.possible(), *summary.faults})
    yield from _table(("fault", "occurred"), {name: f"{summary.faults[name]:,}" for name in names})


def _never_occurred(summary: Summary) -> str:
    """Says which faults never occurred: those for which the suite fails, and those that are
    optional."""
    if summary.seeds < JUDGED_FROM:
        return f"Fewer than {JUDGED_FROM} seeds: a fault that never occurred is no failure yet."
    missing = ", ".join(summary.never_occurred()) or "none"
    optional = (
        ", ".join(sorted(OPTIONAL_FAULTS & {*summary.possible()} - {*+summary.faults})) or "none"
    )
    return f"Faults that never occurred: {missing}; optional ones: {optional}."


def _table(heads: tuple[str, str], rows: dict[str, str]) -> Iterator[str]:
    yield f"| {heads[0]} | {heads[1]} |"
    yield "|---|---|"
    for name, text in rows.items():
        yield f"| {name} | {text} |"
