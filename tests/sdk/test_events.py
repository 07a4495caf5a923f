"""Events, audits and dry runs through the client with the real server."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest

from conveyor.cli.demo import Site
from conveyor.sdk import Client
from conveyor.sdk import client as sdk_client
from tests.cli.program import wait_until

pytestmark = pytest.mark.slow

MISSING = 7


def _has_events(caller: Client, count: int) -> bool:
    return len(list(caller.events())) == count


def test_events_are_read_page_by_page_and_after_a_given_one(
    caller: Client, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk_client, "EVENTS_PAGE", 2)
    for count in (3, 6):
        caller.wait(caller.submit(site.urls(1)).job_id, timeout_s=30)
        # The event of a run's end is written after the run has ended.
        wait_until(partial(_has_events, caller, count))

    events = list(caller.events())

    kinds = ["job.created", "run.created", "run.completed"]
    assert [event.type for event in events] == kinds * 2
    assert [event.id for event in caller.events(after=events[3].id)] == ["5", "6"]
    assert list(caller.events(after="latest")) == []


def test_following_events_continues_after_the_last_one_received(caller: Client, site: Site) -> None:
    caller.wait(caller.submit(site.urls(1)).job_id, timeout_s=30)
    following = caller.follow_events(interval_s=0.01)

    before = list(islice(following, 3))
    caller.submit(site.urls(1))
    after = list(islice(following, 2))

    assert [event.id for event in before + after] == ["1", "2", "3", "4", "5"]


def test_the_audit_is_of_the_latest_run_or_of_a_named_one(caller: Client, site: Site) -> None:
    job = caller.submit(site.urls(9))
    first = caller.wait(job.job_id, timeout_s=30)
    again = caller.rerun(job.job_id, reasons=["bad_target"], hosts=["127.0.0.1"])
    caller.wait(job.job_id, run_id=again.latest_run.run_id, timeout_s=30)

    latest, earlier = caller.audit(job.job_id), caller.audit(job.job_id, run_id=first.run_id)

    assert (again.retried_tasks, again.inherited_tasks) == (1, 8)
    assert (latest.ok, latest.run_id) == (True, again.latest_run.run_id)
    assert (earlier.ok, earlier.counts["failed"]) == (True, 1)


def test_a_preview_returns_counts_and_creates_nothing(caller: Client, site: Site) -> None:
    seen = caller.preview([*site.urls(3), "ftp://example.com/"])
    assert (seen.valid_tasks, seen.invalid_reasons) == (3, {"unsupported_scheme": 1})
    assert list(caller.list()) == []
    job = caller.submit(site.urls(9))
    caller.wait(job.job_id, timeout_s=30)

    narrowed = caller.preview_rerun(job.job_id, statuses=["failed"])

    assert (narrowed.retried_tasks, narrowed.inherited_tasks) == (1, 8)
    assert len(list(caller.runs(job.job_id))) == 1
