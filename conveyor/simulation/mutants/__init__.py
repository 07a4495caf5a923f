"""The mutants, by name: the defects that the simulator must find."""

from __future__ import annotations

from collections.abc import Mapping

from conveyor.simulation.mutants import (
    acceptance,
    aws,
    completion,
    dispatch,
    edges,
    ingest,
    neighbours,
    reads,
    settlement,
    termination,
)
from conveyor.simulation.mutants.mutant import Mutant, PlaceGone

__all__ = ["MUTANTS", "Mutant", "PlaceGone"]

_FAMILIES = (
    acceptance,
    ingest,
    completion,
    dispatch,
    settlement,
    termination,
    reads,
    aws,
    edges,
    neighbours,
)

MUTANTS: Mapping[str, Mutant] = {
    mutant.name: mutant for family in _FAMILIES for mutant in family.MUTANTS
}
"""In the order of a job's life."""
