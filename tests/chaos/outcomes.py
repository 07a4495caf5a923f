"""What came of each death of the kill matrix, kept line by line in a file."""

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
    """`what` is DIED when the process died there and all ended well in spite of it."""

    engine: str
    point: Point
    what: str
    why: str = ""


@dataclass(slots=True)
class Outcomes:
    """Of one engine, from a file and into it."""

    path: Path
    _made: dict[Point, Outcome] = field(default_factory=dict)
    _sites: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in map(json.loads, lines):
            if "sites" in line:
                self._sites[line["story"]] = line["sites"]
            else:
                outcome = Outcome(**{**line, "point": Point(**line["point"])})
                self._made[outcome.point] = outcome

    def __len__(self) -> int:
        return len(self._made)

    def of(self, point: Point) -> Outcome | None:
        return self._made.get(point)

    def all(self) -> list[Outcome]:
        return list(self._made.values())

    def sites_of(self, story: str) -> list[str]:
        return self._sites.get(story, [])

    def note_sites(self, story: str, sites: list[str]) -> None:
        if self._sites.get(story) != sites:
            self._sites[story] = sites
            self._write({"story": story, "sites": sites})

    def note(self, outcome: Outcome) -> None:
        self._made[outcome.point] = outcome
        self._write(asdict(outcome))

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
