"""`conveyor simulate --hunt`: shows that each mutant is found, and keeps the seeds
(docs/simulator.md, Mutants)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from conveyor.simulation.mutants import MUTANTS
from conveyor.simulation.mutants.hunting import (
    Kill,
    cause_of,
    hunt_all,
    huntable,
    read_kills,
    run_mutant,
    world_of,
    write_kills,
)
from conveyor.simulation.simulator import Report


def hunt(names: Sequence[str], seeds: Sequence[int], record: Path | None) -> bool:
    """Whether all were killed. What is known from before is kept, but for what is shown wrong."""
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


def run_until_killed(name: str, seeds: Sequence[int]) -> Report:
    """The report of the first seed that fails, or of the last."""
    assert seeds
    report: Report | None = None
    for seed in seeds:
        report = run_mutant(name, seed)
        click.echo(f"seed {world_of(name, seed).seed}: {cause_of(report) or 'well'}")
        if not report.is_well:
            break
    assert report is not None
    return report


def _line(name: str, kill: Kill | None) -> str:
    how = "survived" if kill is None else f"seed {kill.seed:<4} {kill.tried:>3} tried  {kill.by}"
    return f"{name:<28} window {MUTANTS[name].window:<4} {how}"
