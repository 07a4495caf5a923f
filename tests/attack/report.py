"""The report of an attack: measured figures with their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.attack.arena import Arena

Relation = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float | None
    relation: Relation
    bound: float

    @property
    def holds(self) -> bool:
        """Returns whether the value is within the bound; never if there is no value."""
        if self.value is None:
            return False
        match self.relation:
            case "<=":
                return self.value <= self.bound
            case ">=":
                return self.value >= self.bound
            case "==":
                return self.value == self.bound


@dataclass(slots=True)
class Report:
    figures: list[Figure] = field(default_factory=list)

    def at_most(self, name: str, value: float | None, bound: float) -> None:
        self.figures.append(Figure(name, value, "<=", bound))

    def at_least(self, name: str, value: float | None, bound: float) -> None:
        self.figures.append(Figure(name, value, ">=", bound))

    def equals(self, name: str, value: float | None, bound: float) -> None:
        self.figures.append(Figure(name, value, "==", bound))


@dataclass(frozen=True, slots=True)
class Ground:
    """The arguments of a scenario: the network, the program to attack, a folder, its size."""

    arena: Arena
    python: str
    folder: Path
    is_long: bool
    minutes: float = 0.0

    def choose(self, short: int, long: int) -> int:
        return long if self.is_long else short


Scenario = Callable[[Ground, Report], None]
