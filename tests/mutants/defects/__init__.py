"""The mutants, by name: the defects that the simulator must find."""

from __future__ import annotations

from collections.abc import Mapping

from tests.mutants.defects import (
    acceptance,
    aws,
    completion,
    dispatch,
    edges,
    ingest,
    neighbours,
    packs,
    reads,
    settlement,
    termination,
    two_stores,
)
from tests.mutants.mutant import Mutant

_FAMILIES = (
    acceptance,
    ingest,
    completion,
    dispatch,
    settlement,
    termination,
    reads,
    aws,
    packs,
    two_stores,
    edges,
    neighbours,
)

MUTANTS: Mapping[str, Mutant] = {
    mutant.name: mutant for family in _FAMILIES for mutant in family.MUTANTS
}
"""In the order of the steps of a job."""
