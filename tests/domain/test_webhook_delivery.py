"""The delivery of a notice: every change is fenced by its claim, and delivery attempts end in
time."""

from __future__ import annotations

from random import Random

import pytest

from conveyor.domain import limits
from conveyor.domain import webhook as webhooks
from conveyor.domain.changes import Change, Update
from conveyor.domain.model import DeliveryAttempt, NoticeStatus
from tests.builders import T0, a_notice

DAY_S = 24 * 3600.0
MISS = DeliveryAttempt(T0, 0.1, 500, "http_5xx:500")


def write_of(change: Change) -> Update:
    (write,) = change.writes
    assert isinstance(write, Update)
    return write


def fail_at(now: float, *tries: DeliveryAttempt, due_at: float = T0) -> Update:
    notice = a_notice(tries=tries, claim=1, due_at=due_at)
    tried = DeliveryAttempt(now, 0.1, 500, "http_5xx:500")
    return write_of(
        webhooks.record_failed(notice, tried, retry_after_s=None, now=now, random=Random(1))
    )


def test_a_claim_has_a_number_that_fences_the_writes_after_it() -> None:
    claimed = write_of(webhooks.claim(a_notice(claim=4), now=T0))
    recorded = write_of(webhooks.record_delivered(a_notice(claim=5), DeliveryAttempt(T0, 0.1, 200)))

    assert claimed.deltas == {"claim": 1}
    assert claimed.values == {"due_at": T0 + limits.WEBHOOK_CLAIM_S}
    assert claimed.guard.equals == (("claim", 4),)
    assert recorded.guard.equals == (("claim", 5),)
    assert recorded.guard.status_in == frozenset({NoticeStatus.DUE})


def test_a_claim_lasts_longer_than_its_delivery_attempt() -> None:
    assert limits.WEBHOOK_CLAIM_S > 2 * limits.WEBHOOK_TIMEOUT_S


def test_the_log_keeps_the_latest_attempts_only() -> None:
    tries = tuple(
        DeliveryAttempt(T0 + number, 0.1, 500) for number in range(limits.WEBHOOK_TRIES_KEPT)
    )

    log = fail_at(T0 + 100, *tries).values["tries"]

    assert len(log) == limits.WEBHOOK_TRIES_KEPT
    assert log[:-1] == tries[1:]
    assert log[-1].at == T0 + 100


def test_a_redelivered_notice_starts_its_delays_and_its_deadline_over() -> None:
    now = T0 + 4 * DAY_S
    again = write_of(webhooks.redeliver(a_notice(claim=9, tries=(MISS,) * 9), now=now))
    notice = a_notice(claim=10, tries=(MISS,) * 9, due_since=now)

    tried = DeliveryAttempt(now, 0.1, 500, "http_5xx:500")
    write = write_of(
        webhooks.record_failed(notice, tried, retry_after_s=None, now=now, random=Random(1))
    )

    assert again.values["due_at"] == again.values["due_since"] == now
    assert again.deltas == {"claim": 1}
    assert "status" not in write.values
    assert write.values["due_at"] - now == pytest.approx(5, rel=0.1)


def test_a_failure_after_the_deadline_is_the_last() -> None:
    late = T0 + limits.WEBHOOK_GIVE_UP_S + 1

    assert fail_at(late, due_at=late).values["status"] is NoticeStatus.EXHAUSTED
    assert "status" not in fail_at(late - 2, due_at=late - 2).values


@pytest.mark.parametrize("step_s", [3600.0, DAY_S, 40 * DAY_S])
def test_time_without_delivery_attempts_does_not_count_towards_the_deadline(
    step_s: float,
) -> None:
    """The clock was set forward, or the service was down."""
    notice, now = a_notice(), T0 + step_s

    changes = [
        write_of(webhooks.claim(notice, now=now)),
        write_of(webhooks.postpone(notice, until=now + 60, now=now)),
        write_of(webhooks.defer_for_receiver(notice, until=now + 60, now=now)),
        fail_at(now),
    ]

    assert [change.values["due_since"] for change in changes] == [now] * 4
    assert not any("status" in change.values for change in changes)


def test_a_notice_written_by_a_clock_that_was_ahead_gets_a_full_deadline() -> None:
    ahead = T0 + 40 * DAY_S
    notice = a_notice(due_at=T0, due_since=ahead)

    change = webhooks.pull_back(notice, now=T0)

    assert change is not None
    assert write_of(change).values == {"due_since": T0}


def test_a_notice_for_a_deferred_receiver_waits_until_its_deadline() -> None:
    late = T0 + limits.WEBHOOK_GIVE_UP_S + 1

    waits = write_of(webhooks.defer_for_receiver(a_notice(), until=T0 + 60, now=T0))
    ends = write_of(webhooks.defer_for_receiver(a_notice(due_at=late), until=late + 60, now=late))

    assert waits.values == {"due_at": T0 + 60}
    assert ends.values["status"] is NoticeStatus.EXHAUSTED
    assert ends.values["last_error"] == "receiver_sidelined"


def test_the_earliest_waiting_event_is_delivered_first() -> None:
    first, second, third = (a_notice(number, occurred_at=T0 + number) for number in range(3))
    done = a_notice(0, occurred_at=T0, status=NoticeStatus.DELIVERED)

    assert webhooks.blocking_predecessor(third, [third, second, first]) == first
    assert webhooks.blocking_predecessor(second, [third, second, done]) is None
    assert webhooks.blocking_predecessor(first, [third, second, first]) is None


def test_the_delay_between_delivery_attempts_grows() -> None:
    random = Random(1)

    delays = [
        webhooks.next_delivery_s(attempts, retry_after_s=None, random=random)
        for attempts in range(1, len(webhooks.RETRY_SCHEDULE_S) + 1)
    ]

    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(5, rel=0.1)
    assert delays[-1] == pytest.approx(webhooks.RETRY_SCHEDULE_S[-1], rel=0.1)


@pytest.mark.parametrize(
    ("retry_after_s", "expected"),
    [(60.0, 60.0), (24 * 3600.0, 24 * 3600.0), (999_999_999.0, 24 * 3600.0)],
)
def test_a_receiver_may_ask_for_a_delay_of_at_most_a_day(
    retry_after_s: float, expected: float
) -> None:
    assert webhooks.next_delivery_s(1, retry_after_s=retry_after_s, random=Random(1)) == expected


def test_a_notice_is_given_up_after_three_days() -> None:
    end = T0 + limits.WEBHOOK_GIVE_UP_S
    notice = a_notice(due_since=T0, due_at=end)

    assert not webhooks.is_over(notice, now=end)
    assert webhooks.is_over(notice, now=end + 1)
