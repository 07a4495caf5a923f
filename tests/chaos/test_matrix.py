"""A death at a call site of each short story; `python -m tests.chaos.matrix` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.matrix import die_at, record, sample
from tests.chaos.outcomes import Point
from tests.chaos.scenarios import STORIES
from tests.chaos.site_program import SIDES

pytestmark = pytest.mark.slow


# Some call sites are not passed in every telling of a story.
TRIES = 3
LENGTHY = {"slow", "drained", "limited", "streamed", "cut short"}
SHORT = [name for name, story in STORIES.items() if not story.first_deaths]
SHORT = [name for name in SHORT if name not in LENGTHY]


@pytest.mark.parametrize(("number", "story"), list(enumerate(SHORT)))
def test_a_story_ends_well_though_its_server_dies(tmp_path: Path, number: int, story: str) -> None:
    sites = record(story, tmp_path / "alive")
    writes = [site for site in sites if not site.startswith(("store.find", "store.read"))]

    sites = sample(writes, TRIES, story)
    side = SIDES[number % len(SIDES)]

    assert any(
        die_at(Point(story, site, side), tmp_path / str(number))
        for number, site in enumerate(sites)
    ), f"none of {sites} was passed again"
