"""`python -m tests.mutants` shows that the simulator finds each mutant, and records the seeds
(docs/simulator.md, Mutants)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from conveyor.cli.simulate import exit_code_of, print_failure
from conveyor.simulation.simulator import Report
from tests.mutants.defects import MUTANTS
from tests.mutants.search import (
    Kill,
    cause_of,
    hunt_all,
    huntable,
    notice_together,
    read_kills,
    run_mutant,
    world_of,
    write_kills,
)

HUNTED_SEEDS = 500
"""A mutant that survives 500 seeds needs another checker, client or fault."""


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*MUTANTS]), metavar="[NAME]...")
@click.option("--seed", type=click.IntRange(0), help="Run one mutant on this seed and show why.")
@click.option(
    "--seeds", type=click.IntRange(1), default=HUNTED_SEEDS, help="How many seeds to try."
)
@click.option("--record", type=click.Path(path_type=Path), help="The file for seeds that kill.")
@click.option("--together", is_flag=True, help="Switch all on, and count the seeds that notice.")
def main(
    names: tuple[str, ...], seed: int | None, seeds: int, record: Path | None, *, together: bool
) -> None:
    """Search a seed that kills each (named) mutant; exits with 1 if a mutant survives."""
    if together:
        sys.exit(0 if count_noticed(names or huntable(), range(seeds)) else 1)
    if seed is None:
        sys.exit(0 if hunt(names, range(seeds), record) else 1)
    if len(names) != 1:
        raise click.UsageError("Name one mutant with --seed.")
    report = run_until_killed(names[0], range(seed, seed + 1))
    if not report.has_passed:
        print_failure(report, f"python -m tests.mutants {names[0]} --seed {seed}")
    sys.exit(exit_code_of(report))


def hunt(names: Sequence[str], seeds: Sequence[int], record: Path | None) -> bool:
    """Returns whether all mutants were killed. Records of other mutants stay."""
    kills = read_kills(record) if record is not None else {}
    survivors = []
    for name, kill in hunt_all(names or huntable(), seeds, kills):
        kills.pop(name, None)
        if kill is None:
            survivors.append(name)
        else:
            kills[name] = kill
        click.echo(_line(name, kill))
        if record is not None:
            write_kills(record, kills)
    click.echo(f"{len(survivors)} survived {len(seeds)} seeds: {', '.join(survivors) or 'none'}")
    return not survivors


def count_noticed(names: Sequence[str], seeds: Sequence[int]) -> int:
    """Returns how many seeds notice that all these defects are switched on."""
    noticed = 0
    for seed, cause in notice_together(names, seeds):
        noticed += cause is not None
        click.echo(f"seed {seed}: {cause or 'well'}")
    click.echo(f"{noticed} of {len(seeds)} seeds noticed {len(names)} defects")
    return noticed


def run_until_killed(name: str, seeds: Sequence[int]) -> Report:
    """Returns the report of the first seed that fails, or of the last seed."""
    assert seeds
    report: Report | None = None
    for seed in seeds:
        report = run_mutant(name, seed)
        click.echo(f"seed {world_of(name, seed).seed}: {cause_of(report) or 'well'}")
        if not report.has_passed:
            break
    assert report is not None
    return report


def _line(name: str, kill: Kill | None) -> str:
    how = "survived" if kill is None else f"seed {kill.seed:<4} {kill.tried:>3} tried  {kill.by}"
    return f"{name:<28} window {MUTANTS[name].window:<4} {how}"


if __name__ == "__main__":
    main()
