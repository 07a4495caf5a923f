"""Hunting: seed after seed until one shows that a mutant is no healthy program (SPEC 6.14).

A seed kills a mutant when the program fails on it with the mutant, and is well without. Which seed
that is, is worth keeping: it shows in one run what took a hunt to find.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial

import msgspec

from conveyor.simulation.mutants import MUTANTS
from conveyor.simulation.options import ENGINES, draw
from conveyor.simulation.simulator import Report, simulate

HUNTED_ON = "memory"
"""The quickest world, for defects that every engine has."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """The first seed that killed a mutant, how many it took, and who noticed."""

    mutant: str
    window: int
    engine: str
    seed: int
    tried: int
    by: str


def can_be_hunted(name: str) -> bool:
    """Whether there is a world with the engine that has the defect."""
    return engine_for(name) in ENGINES


def engine_for(name: str) -> str:
    return next(iter(MUTANTS[name].engines), HUNTED_ON)


def run_mutant(name: str, seed: int) -> Report:
    with MUTANTS[name].apply():
        return simulate(draw(seed, engine=engine_for(name)))


@cache
def is_well_without(seed: int, engine: str) -> bool:
    """Whether the program as it is survives a seed."""
    return simulate(draw(seed, engine=engine)).is_well


def cause_of(report: Report) -> str | None:
    """Who noticed: a checker, the clock, or the program itself by falling over."""
    if report.violations:
        return report.violations[0].checker
    if report.liveness_failures:
        return "something never ended"
    return "the program crashed" if report.crashes else None


def hunt(name: str, seeds: Iterable[int]) -> Kill | None:
    """The first of these seeds that kills the mutant; None if it survives them all."""
    engine = engine_for(name)
    for tried, seed in enumerate(seeds, start=1):
        cause = cause_of(run_mutant(name, seed))
        if cause is not None and is_well_without(seed, engine):
            return Kill(
                mutant=name,
                window=MUTANTS[name].window,
                engine=engine,
                seed=seed,
                tried=tried,
                by=cause,
            )
    return None


def hunt_all(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, Kill | None]]:
    """Hunts these mutants on all cores, in whatever order they end."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(names), len(os.sched_getaffinity(0)))) as pool:
        yield from pool.imap_unordered(partial(_named_hunt, seeds=seeds), names)


def _named_hunt(name: str, *, seeds: Sequence[int]) -> tuple[str, Kill | None]:
    return name, hunt(name, seeds)
