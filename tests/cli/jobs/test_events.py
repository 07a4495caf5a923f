"""`conveyor jobs events` and `audit`, and dry runs, against a real server."""

from __future__ import annotations

import json

import pytest

from conveyor.cli.demo import Site
from tests.cli.jobs.test_jobs import MISSING, finished, pages, told
from tests.cli.program import Program

pytestmark = pytest.mark.slow


def test_events_tell_what_happened_in_order(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, 1)

    output = caller.run("jobs", "events")
    listed = [json.loads(line) for line in caller.run("jobs", "events", "--json").lines]
    rest = caller.run("jobs", "events", "--after", listed[0]["id"], "--json").lines

    kinds = ["job.created", "run.created", "run.completed"]
    assert [event["type"] for event in listed] == kinds
    assert [line.split()[3] for line in output.lines] == kinds
    assert job_id in output.lines[0]
    assert len(rest) == 2


def test_events_of_somebody_new_are_none(caller: Program) -> None:
    ended = caller.run("jobs", "events")

    assert (ended.code, ended.out) == (0, "")
    assert "Nothing has happened" in ended.err


def test_an_audit_tells_that_everything_adds_up(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, 1, MISSING)

    ended = caller.run("jobs", "audit", job_id)

    assert ended.code == 0
    assert "everything adds up" in ended.out
    assert told(caller.run("jobs", "audit", job_id, "--json"))["bodies_checked"] == 2


def test_a_dry_submit_tells_and_creates_nothing(caller: Program, site: Site) -> None:
    caller.write("good.txt", *pages(site, 0, 1))
    caller.write("bad.txt", *pages(site, 0), "ftp://example.com/")

    good = caller.run("jobs", "submit", "good.txt", "--dry-run")
    bad = caller.run("jobs", "submit", "bad.txt", "--dry-run")

    assert "2 tasks would be accepted. Nothing was created." in good.out
    assert "It would be refused: 1 bad line (1 unsupported_scheme)." in bad.out
    assert caller.run("jobs", "list", "--json").lines == []


def test_a_rerun_may_be_narrowed_and_tried_dry(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, 1, MISSING)
    narrow = ("--reason", "bad_target", "--host", "127.0.0.1")

    dry = caller.run("jobs", "rerun", job_id, *narrow, "--dry-run")
    none = caller.run("jobs", "rerun", job_id, "--host", "other.example")
    real = told(caller.run("jobs", "rerun", job_id, *narrow, "--json"))

    assert "Over again: 1 task. Kept as they are: 2. Nothing was started." in dry.out
    assert (none.code, "No task of the latest run matches" in none.err) == (2, True)
    assert (real["retried_tasks"], real["inherited_tasks"]) == (1, 2)


def test_a_paused_job_says_what_it_waits_for(caller: Program, site: Site) -> None:
    caller.write("list.txt", *pages(site, 0))
    submitted = caller.run("jobs", "submit", "list.txt", "--open", "--json")
    job_id = told(submitted)["job_id"]
    caller.run("jobs", "pause", job_id)
    caller.run("jobs", "add", job_id, "list.txt")

    assert "paused: paused until somebody resumes it" in caller.run("jobs", "show", job_id).out
