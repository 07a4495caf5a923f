"""`conveyor webhooks` and `conveyor jobs webhook` against a real server."""

from __future__ import annotations

import json

import pytest

from conveyor.cli.demo import Site
from tests.cli.jobs.test_jobs import submit, told
from tests.cli.program import Program, wait_until
from tests.e2e.receiver import a_receiver

pytestmark = pytest.mark.slow


def test_keys_are_made_shown_and_finalized(caller: Program) -> None:
    none = caller.run("webhooks", "keys")
    first = told(caller.run("webhooks", "rotate", "--json"))
    second = caller.run("webhooks", "rotate")
    pending = caller.run("webhooks", "rotate")
    keys = caller.run("webhooks", "keys")
    done = told(caller.run("webhooks", "finalize", "--json"))
    cancelled = caller.run("webhooks", "cancel")

    assert "conveyor webhooks rotate" in none.err
    assert "not shown again" in second.err
    assert (pending.code, "finalize or cancel" in pending.err) == (2, True)
    assert first["kid"] in keys.lines[0]
    assert first["secret"] not in keys.out
    assert done["active_kid"] in second.out
    assert cancelled.code == 0


def test_a_receiver_is_tried_out_and_the_exit_code_tells(caller: Program) -> None:
    with a_receiver() as receiver:
        taken = caller.run("webhooks", "test", receiver.url)
        receiver.status = 500
        refused = caller.run("webhooks", "test", receiver.url)
        unsigned = caller.run("webhooks", "test", receiver.url, "--sign")

    assert (taken.code, refused.code, unsigned.code) == (0, 1, 2)
    assert "http_5xx:500" in refused.out
    assert "no active HMAC key" in unsigned.err


def test_a_job_is_given_a_webhook_and_its_events_are_told_again(
    caller: Program, site: Site
) -> None:
    caller.run("webhooks", "rotate")
    with a_receiver() as receiver:
        job_id = submit(caller, site, 0, options=("--open", "--webhook", receiver.url, "--sign"))
        output = caller.run("jobs", "webhook", job_id)
        caller.run("jobs", "webhook", job_id, "--set", f"{receiver.url}/new")
        caller.run("jobs", "close", job_id)
        wait_until(lambda: receiver.received)
        wait_until(lambda: "delivered" in caller.run("jobs", "webhook", job_id, "--deliveries").out)
        log = caller.run("jobs", "webhook", job_id, "--deliveries", "--json")
        event = json.loads(log.lines[0])
        again = caller.run("jobs", "webhook", job_id, "--redeliver", event["event_id"])
        wait_until(lambda: len(receiver.received) == 2)
    removed = caller.run("jobs", "webhook", job_id, "--remove")
    gone = caller.run("jobs", "webhook", job_id)

    assert output.out.strip() == f"{receiver.url} (signed)"
    assert event["event_type"] == "run.completed"
    assert "due again" in again.out
    assert removed.code == 0
    assert (gone.code, "no webhook" in gone.err) == (2, True)


def test_one_thing_is_asked_for_at_a_time(caller: Program) -> None:
    ended = caller.run("jobs", "webhook", "x", "--remove", "--deliveries")

    assert (ended.code, "Choose one of" in ended.err) == (2, True)
