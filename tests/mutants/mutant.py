"""Mutant: one defect of the product that can be switched on for a while.

A mutant takes away what closes a window and puts a plausible mistake in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conveyor.simulation.swaps import Apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`window` is the number of the way to fail that it opens, `invariants` are those that break.
    `engines` have the defect; any, if none is named. `world` are options in which it soon matters:
    what a seed draws otherwise may leave out for long what it takes."""

    name: str
    window: int
    invariants: tuple[int, ...]
    what: str
    apply: Apply
    engines: tuple[str, ...] = ()
    world: Mapping[str, Any] = field(default_factory=dict)
