"""Mutant: a defect of the product that can be switched on.

A mutant replaces the code that prevents a failure with a plausible mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conveyor.simulation.swaps import Apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`window` is the number of the failure mode that the mutant opens; `invariants` are those that
    it breaks. `engines` have the defect: all, if none is named. `world` are simulation options
    under which the defect matters soon, because a random world may rarely meet its conditions."""

    name: str
    window: int
    invariants: tuple[int, ...]
    what: str
    apply: Apply
    engines: tuple[str, ...] = ()
    world: Mapping[str, Any] = field(default_factory=dict)
