"""The kill matrix: ends real processes before and after every call site of the ports.

`python -m tests.chaos.matrix` runs it on the embedded engine, prints a line for each death, and
writes MATRIX.md; with names, it runs only those stories. The process dies at each site in the first
story that passes the site, and in further stories if the site was not passed again; with
`--every-story`, in all of them. Outcomes are stored in a file, so that a run continues where an
earlier one ended.

It fails on a bad outcome, and on a site or a side of it that no story passes, unless that is
listed with its reason (`unreached.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Lock

from tests.chaos import page
from tests.chaos.client import Client
from tests.chaos.outcomes import BAD, DIED, NOT_PASSED, Outcome, Outcomes, Point
from tests.chaos.scenarios import STORIES, running_program
from tests.chaos.site_program import SIDES
from tests.e2e.audit import violations
from tests.e2e.programs import a_site
from tests.e2e.receiver import a_receiver

ENGINE = "embedded"
TRIES = 3  # A story passes some sites only in some runs.


def record(story: str, folder: Path) -> list[str]:
    """Returns the sites that a story passes without a death, start and stop of the server included.

    It fails if the story does not end as it should.
    """
    notes = folder / "sites.txt"
    assert not run_story(story, folder, f"record:{notes}")
    return sorted(set(notes.read_text().split()))


def die_at(point: Point, folder: Path) -> bool:
    """Runs the story with a death at that point. Returns False if the point was never passed."""
    for number in range(TRIES):
        if run_story(point.story, folder / str(number), f"{point.side}:{point.site}"):
            return True
    return False


def run_story(story: str, folder: Path, crash_at: str) -> bool:
    """Runs a story. Returns whether the server died; raises if the story does not end well."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data"
    scenario = STORIES[story]
    first, *later = (*scenario.first_deaths, crash_at)
    with a_site() as site, a_receiver() as receiver, ExitStack() as programs:
        environ = {name: value.format(port=site.port) for name, value in scenario.environ.items()}
        server = programs.enter_context(running_program(data, environ, first))
        client = Client(server, site, receiver, lives=later)
        scenario.run(client)
        jobs = client.get("/v1/jobs")["jobs"]
    problems = violations(data)
    assert len(jobs) == scenario.jobs_count, jobs
    assert problems == [], problems
    return client.deaths > len(scenario.first_deaths)


def sample(points: Sequence[str], count: int, seed: str) -> list[str]:
    return sorted(Random(seed).sample(points, min(count, len(points))))


@dataclass(slots=True)
class Matrix:
    outcomes: Outcomes
    is_every_story: bool
    lock: Lock = field(default_factory=Lock)

    def points(self, stories: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
        """Yields each site and side with the stories that pass the site."""
        passed = {story: self._sites_of(story) for story in stories}
        for site in sorted(set().union(*passed.values())):
            for side in SIDES:
                yield site, side, [story for story in stories if site in passed[story]]

    def _sites_of(self, story: str) -> list[str]:
        known = self.outcomes.sites_of(story)
        if not known:
            known = _record(story)
            self.outcomes.add_sites(story, known)
        return known

    def run(self, point: tuple[str, str, list[str]]) -> None:
        site, side, stories = point
        for story in stories:
            outcome = self.outcomes.of(Point(story, site, side)) or self._die(story, site, side)
            if outcome.what != NOT_PASSED and not self.is_every_story:
                return

    def _die(self, story: str, site: str, side: str) -> Outcome:
        outcome = _outcome_of(Point(story, site, side))
        with self.lock:
            self.outcomes.note(outcome)
            count = len(self.outcomes)
        print(f"{count:4} {outcome.what:10} {side:6} {site} ({story}) {outcome.why}", flush=True)
        return outcome


def _record(story: str) -> list[str]:
    with tempfile.TemporaryDirectory() as home:
        sites = record(story, Path(home))
    print(f"{story} passes {len(sites)} sites", flush=True)
    return sites


def _outcome_of(point: Point) -> Outcome:
    with tempfile.TemporaryDirectory() as home:
        try:
            return Outcome(ENGINE, point, DIED if die_at(point, Path(home)) else NOT_PASSED)
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{line.name}:{line.lineno} {error}".replace("\n", " ")
            return Outcome(ENGINE, point, BAD, why[:500])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.matrix")
    parser.add_argument("stories", nargs="*", default=list(STORIES))
    parser.add_argument("--every-story", action="store_true")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--kept", type=Path, default=page.KEPT)
    options = parser.parse_args(arguments)
    matrix = Matrix(Outcomes(options.kept), options.every_story)
    with ThreadPoolExecutor(options.at_once) as threads:
        list(threads.map(matrix.run, list(matrix.points(options.stories))))
    problems = page.write(matrix.outcomes)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
