"""Charts: a series is distributed over columns, and every task is counted once."""

from __future__ import annotations

import re

import pytest

from conveyor.schemas.responses import SeriesBucket, Spend
from conveyor.schemas.views import instant
from conveyor.ui.chart import COLUMNS_MAX, HEIGHT, WIDTH, make_chart
from tests.builders import T0


def a_bucket(since: float, until: float, ok: int, failed: int = 0) -> SeriesBucket:
    return SeriesBucket(
        since=instant(T0 + since),
        until=instant(T0 + until),
        successful=ok,
        failed=failed,
        failure_reasons={"timeout": failed} if failed else {},
        bytes=10 * ok,
        spend=Spend(credits=ok, cost=ok / 1000),
    )


def test_a_bucket_of_a_minute_is_one_column() -> None:
    buckets = [a_bucket(0, 60, 10), a_bucket(60, 120, 20, 5)]

    chart = make_chart(buckets, since=T0, until=T0 + 120)

    assert [column.successful for column in chart.columns] == [10, 20]
    assert [column.failed for column in chart.columns] == [0, 5]
    assert (chart.peak, chart.minutes) == (25, 1)


def test_a_long_bucket_is_divided_by_time() -> None:
    chart = make_chart([a_bucket(0, 240, 80)], since=T0, until=T0 + 240)

    assert [column.successful for column in chart.columns] == pytest.approx([20, 20, 20, 20])


def test_tasks_that_ended_before_the_chart_are_left_out() -> None:
    buckets = [a_bucket(-7200, -3600, 1000), a_bucket(-60, 60, 10)]

    chart = make_chart(buckets, since=T0, until=T0 + 600)

    assert chart.sum.successful == pytest.approx(5)


def test_a_long_chart_has_few_columns_and_all_tasks() -> None:
    buckets = [a_bucket(60 * n, 60 * n + 60, n, 1) for n in range(300)]

    chart = make_chart(buckets, since=T0, until=T0 + 300 * 60)

    assert len(chart.columns) == COLUMNS_MAX
    assert chart.minutes == 5
    assert chart.sum.successful == pytest.approx(sum(range(300)))
    assert chart.sum.reasons["timeout"] == pytest.approx(300)
    assert len(chart.rows) <= 12
    assert sum(row.failed for row in chart.rows) == pytest.approx(300)


def test_a_bucket_of_zero_length_at_the_end_is_counted() -> None:
    chart = make_chart([a_bucket(600, 600, 3)], since=T0, until=T0 + 600)

    assert chart.sum.successful == 3


def test_the_bars_stay_within_the_drawing_and_failures_are_at_the_bottom() -> None:
    buckets = [a_bucket(0, 60, 30, 10), a_bucket(60, 120, 0, 20)]

    chart = make_chart(buckets, since=T0, until=T0 + 120)

    assert re.match(rf"M\d+ {HEIGHT}V75h", chart.failed_path)
    assert re.match(r"M\d+ 75V0h", chart.successful_path)
    numbers = [int(number) for number in re.findall(r"\d+", chart.failed_path)]
    assert max(numbers) <= WIDTH


def test_each_bar_is_above_its_part_of_the_axis() -> None:
    """The axis is labelled with the ends of the chart, however few columns there are."""
    chart = make_chart([a_bucket(60, 120, 30)], since=T0, until=T0 + 120)

    left, width = map(int, re.findall(r"M(\d+) .*h(\d+)", chart.successful_path)[0])
    assert left + width / 2 == pytest.approx(0.75 * WIDTH, abs=1)


def test_a_series_without_ended_tasks_makes_an_empty_drawing() -> None:
    chart = make_chart([], since=T0, until=T0 + 600)

    assert (chart.successful_path, chart.failed_path, chart.peak) == ("", "", 0)
