"""Runs each short story with a death at one site; tests.chaos.matrix covers all sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.matrix import die_at, record, sample
from tests.chaos.outcomes import Point
from tests.chaos.scenarios import STORIES
from tests.chaos.site_program import SIDES

pytestmark = pytest.mark.slow


# A story passes some call sites only in some runs.
TRIES = 3
LENGTHY = {"slow", "drained", "limited", "streamed", "cut short"}
SHORT = [name for name, story in STORIES.items() if not story.first_deaths]
SHORT = [name for name in SHORT if name not in LENGTHY]


@pytest.mark.parametrize(("number", "story"), list(enumerate(SHORT)))
def test_a_story_ends_well_if_its_server_dies(tmp_path: Path, number: int, story: str) -> None:
    sites = record(story, tmp_path / "alive")
    writes = [site for site in sites if not site.startswith(("store.find", "store.read"))]

    sites = sample(writes, TRIES, story)
    side = SIDES[number % len(SIDES)]

    assert any(
        die_at(Point(story, site, side), tmp_path / str(number))
        for number, site in enumerate(sites)
    ), f"none of {sites} was passed again"
