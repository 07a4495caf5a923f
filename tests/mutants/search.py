"""Searches seeds that kill mutants (docs/simulator.md, Mutants).

A seed kills a mutant if the simulation fails with the mutant and succeeds without it. Such a seed
is recorded: it shows in one run what took many runs to find.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from conveyor.simulation.options import ALL_ENGINES, Options, draw
from conveyor.simulation.profiles import without_internal_faults
from conveyor.simulation.simulator import Report, simulate
from conveyor.simulation.swaps import combine
from tests.mutants.defects import MUTANTS

HUNTED_ON = "memory"
"""The fastest engine to simulate, for defects that every engine has."""

HOURS = 120 / 3600
"""Two minutes: two short worlds find more than one long world in the same time."""

ENDED_S = 2400.0
"""Seconds after the last fault within which every run must have ended."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """The seed that killed a mutant, how many seeds were tried, and the checker that noticed."""

    mutant: str
    window: int
    seed: int
    tried: int
    by: str


def huntable() -> list[str]:
    """Returns the mutants whose engine can be simulated."""
    return [name for name in MUTANTS if _engine_for(name) in ALL_ENGINES]


def _engine_for(name: str) -> str:
    return next(iter(MUTANTS[name].engines), HUNTED_ON)


def world_of(name: str, seed: int) -> Options:
    """Returns the options that a seed draws, changed by the options of the mutant."""
    options = draw(seed, engine=_engine_for(name), hours=HOURS)
    options = msgspec.structs.replace(options, liveness_s=ENDED_S)
    return fitted(options, MUTANTS[name].world)


def fitted(options: Options, world: Mapping[str, Any]) -> Options:
    """Returns these options with those of a mutant. Fault rates that the mutant does not name stay.
    The faults of our own processes are off only if the mutant says so with `is_fault_free`."""
    if not world:
        return options
    options = without_internal_faults(options) if world.get("is_fault_free") else options
    changed = {"is_fault_free": False, **world, "rates": options.rates | world.get("rates", {})}
    options = msgspec.structs.replace(options, **changed)
    if options.conditions.storage_outage_every_s:  # Storage outages are faults of our engine.
        return msgspec.structs.replace(options, is_fault_free=False)
    return options


def run_mutant(name: str, seed: int) -> Report:
    with MUTANTS[name].apply():
        return simulate(world_of(name, seed))


def run_together(names: Sequence[str], seed: int) -> Report:
    """Simulates the options that a seed draws, with several defects switched on."""
    with combine(*(MUTANTS[name].apply for name in names))():
        return simulate(draw(seed))


def notice_together(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """Yields for each seed what noticed the defects, which are all switched on."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(seeds), len(os.sched_getaffinity(0)))) as pool:
        causes = pool.imap(partial(_notice, tuple(names)), seeds)
        yield from zip(seeds, causes, strict=True)


def _notice(names: tuple[str, ...], seed: int) -> str | None:
    return cause_of(run_together(names, seed))


def is_well_without(name: str, seed: int) -> bool:
    """Returns whether the program without the mutant succeeds with the same options."""
    return _is_well(msgspec.json.encode(world_of(name, seed)))


@cache
def _is_well(world: bytes) -> bool:
    return simulate(msgspec.json.decode(world, type=Options)).has_passed


def cause_of(report: Report) -> str | None:
    """Returns what noticed the defect: a checker, a deadline, or a crash of the program."""
    if report.violations:
        return report.violations[0].checker
    if report.liveness_failures:
        return "something never ended"
    return "the program crashed" if report.crashes else None


def hunt(name: str, seeds: Iterable[int]) -> Kill | None:
    """Returns the first seed that kills the mutant; None if it survives all of them."""
    for tried, seed in enumerate(seeds, start=1):
        cause = cause_of(run_mutant(name, seed))
        if cause is not None and is_well_without(name, seed):
            window = MUTANTS[name].window
            return Kill(mutant=name, window=window, seed=seed, tried=tried, by=cause)
    return None


def hunt_all(
    names: Sequence[str], seeds: Sequence[int], known: Mapping[str, Kill]
) -> Iterator[tuple[str, Kill | None]]:
    """Hunts these mutants on all cores, in the order in which the hunts end. A recorded seed is
    tried first; if it still kills, the recorded number of tries stays."""
    hunts = [(name, known.get(name), seeds) for name in names]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(hunts), len(os.sched_getaffinity(0)))) as pool:
        yield from pool.imap_unordered(_hunt_again, hunts)


def _hunt_again(hunted: tuple[str, Kill | None, Sequence[int]]) -> tuple[str, Kill | None]:
    name, known, seeds = hunted
    if known is not None:
        kill = hunt(name, [known.seed])
        if kill is not None:
            return name, msgspec.structs.replace(kill, tried=known.tried)
    return name, hunt(name, seeds)


def read_kills(path: Path) -> dict[str, Kill]:
    """Returns the recorded kills by the name of the mutant; none if there is no file."""
    if not path.exists():
        return {}
    kills = msgspec.json.decode(path.read_bytes(), type=list[Kill])
    return {kill.mutant: kill for kill in kills}


def write_kills(path: Path, kills: Mapping[str, Kill]) -> None:
    """Writes one line per mutant, in a fixed order, so that a change of one changes one line."""
    lines = [msgspec.json.encode(kills[name]).decode() for name in MUTANTS if name in kills]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
