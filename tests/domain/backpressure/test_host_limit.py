"""Host limits: which limit applies to a host, and how long a call waits for its turn."""

from __future__ import annotations

import pytest

from conveyor.domain import limits, timing
from conveyor.domain.model import HostLimit, HostLimits, RowsOf, TaskStatus
from conveyor.domain.run.ingestion import matches_filter
from conveyor.domain.submit.target import host_of
from tests.builders import RUN, a_task


def test_a_host_with_its_own_limits_is_not_bound_by_the_default() -> None:
    special = HostLimit(rate_per_s=0.5)
    host_limits = HostLimits(HostLimit(concurrency=2), {"slow.example": special})

    assert host_limits.limit_for("slow.example") == special
    assert host_limits.limit_for("fast.example") == HostLimit(concurrency=2)


def test_the_host_of_a_url_is_lower_case_and_without_its_port() -> None:
    assert host_of("https://WWW.Example.com:8443/a?b") == "www.example.com"


def test_an_invalid_url_has_no_host_and_matches_no_host_filter() -> None:
    """With `on_invalid=skip`, invalid lines become tasks too, and a rerun tries them again."""
    bad = a_task(url="ftp://site.example/")

    assert host_of(bad.url) is None
    assert not matches_filter(
        bad,
        RowsOf(run_id=RUN, retry=frozenset(TaskStatus), hosts=frozenset({"site.example"})),
    )


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (HostLimit(rate_per_s=5.0), 0.2),
        (HostLimit(concurrency=4), 0.5),
        (HostLimit(concurrency=4, rate_per_s=1.0), 1.0),
        (HostLimit(), 0.0),
    ],
)
def test_turns_come_as_often_as_the_stricter_limit_allows(limit: HostLimit, seconds: float) -> None:
    assert timing.host_interval_s(limit, fetch_s=2.0) == pytest.approx(seconds)


def test_a_wait_for_a_turn_is_bounded_and_short_while_the_rate_is_estimated() -> None:
    assert timing.host_wait_s(100.0, now=99.0, is_sure=True) == 1.0
    assert timing.host_wait_s(100.0, now=200.0, is_sure=True) == limits.HOST_WAIT_S_MIN
    assert timing.host_wait_s(10_000.0, now=0.0, is_sure=True) == limits.BOUNCE_S_MAX
    assert timing.host_wait_s(10_000.0, now=0.0, is_sure=False) == limits.BOUNCE_S_MIN
