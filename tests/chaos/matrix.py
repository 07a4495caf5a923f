"""The kill matrix: every call site of every story, before and after, with real processes.

`python -m tests.chaos.matrix` runs all of it and prints a line for each death; with names, only
those stories.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.sites import SIDES
from tests.chaos.stories import STORIES, Client, a_program
from tests.e2e.audit import violations
from tests.e2e.programs import a_site
from tests.e2e.receiver import a_receiver

TRIES = 3  # A site that is passed only now and then is waited for.


@dataclass(frozen=True, slots=True)
class Point:
    story: str
    site: str
    side: str


def record(story: str, folder: Path) -> list[str]:
    """The sites that a story passes when nothing goes wrong, start and end of the server included.

    Also shows that the story holds without a death.
    """
    notes = folder / "sites.txt"
    assert tell(story, folder, f"record:{notes}") == 0
    return sorted(set(notes.read_text().split()))


def die_at(point: Point, folder: Path) -> bool:
    """Tells the story with a death at that point; False when it was not passed this time."""
    for number in range(TRIES):
        if tell(point.story, folder / str(number), f"{point.side}:{point.site}"):
            return True
    return False


def tell(story: str, folder: Path, crash_at: str) -> int:
    """How often the server died. Raises AssertionError when the story does not end well."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data"
    with (
        a_site() as site,
        a_receiver() as receiver,
        a_program(data, CONVEYOR_CRASH_AT=crash_at) as server,
    ):
        client = Client(server, site, receiver)
        STORIES[story](client)
        jobs = client.get("/v1/jobs")["jobs"]
    assert len(jobs) == (story != "deleted")
    assert violations(data) == []
    return client.deaths


def sample(points: Sequence[str], count: int, seed: str) -> list[str]:
    return sorted(Random(seed).sample(points, min(count, len(points))))


def main(arguments: list[str]) -> int:
    known: set[str] = set()
    died, missed, bad = 0, 0, 0
    for story in arguments or STORIES:
        with tempfile.TemporaryDirectory() as home:
            sites = [site for site in record(story, Path(home)) if site not in known]
        known.update(sites)
        print(f"{story}: {len(sites)} new sites", flush=True)
        for site in sites:
            for side in SIDES:
                point = Point(story, site, side)
                with tempfile.TemporaryDirectory() as home:
                    try:
                        reached = die_at(point, Path(home))
                    except AssertionError as error:
                        bad += 1
                        print(f"  BAD   {point}: {error}", flush=True)
                        continue
                died, missed = died + reached, missed + (not reached)
                print(f"  {'died ' if reached else 'alive'} {side:6} {site}", flush=True)
    print(f"{len(known)} sites, {died} deaths, {missed} not passed again, {bad} bad outcomes")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
