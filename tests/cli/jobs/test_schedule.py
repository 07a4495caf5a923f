"""`conveyor jobs` and schedules, against a real server."""

from __future__ import annotations

import pytest

from conveyor.cli.demo import Site
from tests.cli.jobs.test_jobs import submit, told
from tests.cli.program import Program

pytestmark = pytest.mark.slow


def test_a_schedule_is_shown_replaced_paused_and_resumed(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0, options=("--every", "1d"))
    options = ("--cron", "30 9 * * mon-fri", "--timezone", "Europe/Berlin", "--overlap", "queue")

    output = caller.run("jobs", "schedule", job_id)
    changed = told(caller.run("jobs", "schedule", job_id, *options, "--pause", "--json"))
    paused = caller.run("jobs", "schedule", job_id)
    resumed = told(caller.run("jobs", "schedule", job_id, "--resume", "--json"))

    assert '{"rate":{"every":1,"unit":"day"}}' in output.out
    assert changed["schedule"] == {
        "cron": "30 9 * * mon-fri",
        "timezone": "Europe/Berlin",
        "overlap": "queue",
    }
    assert changed["schedule_state"] == "paused"
    assert "paused" in paused.out
    assert resumed["schedule_state"] == "active"


def test_submitting_with_a_schedule_says_where_to_look(caller: Program, site: Site) -> None:
    caller.write("list.txt", "https://example.com/")

    ended = caller.run("jobs", "submit", "list.txt", "--every", "2h", "--watch")

    assert ended.code == 0
    assert "conveyor jobs schedule 01" in ended.out


def test_a_job_without_a_schedule_says_so(caller: Program, site: Site) -> None:
    ended = caller.run("jobs", "schedule", submit(caller, site, 0))

    assert "The job has no schedule: that is for jobs submitted with --at" in ended.err


def test_a_scheduled_job_is_fired_by_hand(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0, 1, options=("--every", "1d"))

    ended = caller.run("jobs", "rerun", job_id, "--watch")

    assert ended.code == 0
    assert "2 tasks" in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--every", "5"), "15m, 2h or 1d"),
        (("--every", "0m"), "15m, 2h or 1d"),
        (("--every", "1h", "--cron", "* * * * *"), "one of --at, --every and --cron"),
        (("--cron", "* * *"), "five fields"),
        (("--at", "2030-01-01T00:00", "--timezone", "Mars/Base"), "IANA"),
        (("--at", "2001-01-01T00:00"), "never fire"),
    ],
)
def test_a_bad_schedule_is_explained(caller: Program, options: tuple[str, ...], words: str) -> None:
    caller.write("list.txt", "https://example.com/")

    ended = caller.run("jobs", "submit", "list.txt", *options)

    assert ended.code != 0
    assert words in ended.err
