"""Stores the outcome of each death of the kill matrix, line by line in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

DIED, NOT_PASSED, BAD = "died", "not passed", "BAD"


@dataclass(frozen=True, slots=True)
class Point:
    story: str
    site: str
    side: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`what` is DIED if the process died at the point and the story still ended as it should."""

    engine: str
    point: Point
    what: str
    why: str = ""


@dataclass(slots=True)
class Outcomes:
    """The outcomes of one engine, read from a file and appended to it."""

    path: Path
    _outcomes: dict[Point, Outcome] = field(default_factory=dict)
    _sites: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in map(json.loads, lines):
            if "sites" in line:
                self._sites[line["story"]] = line["sites"]
            else:
                outcome = Outcome(**{**line, "point": Point(**line["point"])})
                self._outcomes[outcome.point] = outcome

    def __len__(self) -> int:
        return len(self._outcomes)

    def of(self, point: Point) -> Outcome | None:
        return self._outcomes.get(point)

    def all(self) -> list[Outcome]:
        return list(self._outcomes.values())

    def sites_of(self, story: str) -> list[str]:
        return self._sites.get(story, [])

    def add_sites(self, story: str, sites: list[str]) -> None:
        if self._sites.get(story) != sites:
            self._sites[story] = sites
            self._write({"story": story, "sites": sites})

    def note(self, outcome: Outcome) -> None:
        self._outcomes[outcome.point] = outcome
        self._write(asdict(outcome))

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
