"""What an attack measured: figures with their bounds."""

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
        """A figure without a value is something that never happened: it holds no bound."""
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
    """What a scenario is given: the network, the program to attack, a folder, and its size."""

    arena: Arena
    python: str
    folder: Path
    is_long: bool
    minutes: float = 0.0

    def choose(self, short: int, long: int) -> int:
        return long if self.is_long else short


Scenario = Callable[[Ground, Report], None]
