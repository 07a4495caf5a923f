"""Charts: the series of runs, spread over the columns of a bar chart (docs/dashboard.md, Charts).

A chart is drawn by the template as SVG with plain attributes, beside a table with the same figures
for readers who cannot see it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from conveyor.schemas.responses import SeriesBucket

# A bar is at least a minute, because the series has one bucket a minute.
_MINUTE_S = 60.0
# More columns than this are too narrow on a phone.
COLUMNS_MAX = 60
# With fewer columns the bars would be as wide as the page, so they stand apart.
_COLUMNS_MIN = 12
# Rows of the table beside the chart: a reader listens to all of them.
_ROWS_MAX = 12
# The coordinates of the drawing, which is stretched to the width of the page.
WIDTH, HEIGHT = 1000, 100


@dataclass(slots=True)
class Column:
    """What ended between two times: parts of a bucket count as parts of a task."""

    since: float
    until: float
    successful: float = 0.0
    failed: float = 0.0
    bytes: float = 0.0
    credits: float = 0.0
    cost: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, bucket: SeriesBucket, share: float) -> None:
        self.successful += bucket.successful * share
        self.failed += bucket.failed * share
        self.bytes += bucket.bytes * share
        self.credits += bucket.spend.credits * share
        self.cost += bucket.spend.cost * share
        for reason, count in bucket.failure_reasons.items():
            self.reasons[reason] += count * share  # type: ignore[assignment]

    @property
    def ended(self) -> float:
        return self.successful + self.failed

    @property
    def minutes(self) -> float:
        """At least one: what ended within a second does not stand for a minute of such seconds."""
        return max(_MINUTE_S, self.until - self.since) / _MINUTE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    columns: Sequence[Column]
    since: str
    until: str

    @property
    def minutes(self) -> int:
        """The width of a bar."""
        return max(1, round(self.columns[0].minutes)) if self.columns else 1

    @property
    def peak(self) -> float:
        """The most pages a minute."""
        return max((column.ended / column.minutes for column in self.columns), default=0.0)

    @property
    def successful_path(self) -> str:
        """The bars of successful tasks as one SVG path: it is far shorter than a shape each."""
        return self._path(lambda column: (column.failed, column.ended))

    @property
    def failed_path(self) -> str:
        return self._path(lambda column: (0.0, column.failed))

    def _path(self, extent: Callable[[Column], tuple[float, float]]) -> str:
        """Draws a bar for each column, from the first to the second value, in WIDTH by HEIGHT."""
        step = WIDTH / max(1, len(self.columns))
        width = round(0.8 * min(step, WIDTH / _COLUMNS_MIN))
        bars: list[str] = []
        for number, column in enumerate(self.columns):
            low, high = (
                round(HEIGHT * (1.0 - value / column.minutes / (self.peak or 1.0)))
                for value in extent(column)
            )
            if low > high:
                left = round((number + 0.5) * step - width / 2)
                bars.append(f"M{left} {low}V{high}h{width}V{low}z")
        return "".join(bars)

    @property
    def rows(self) -> list[Column]:
        """The same figures in few rows, for the table."""
        size = math.ceil(len(self.columns) / _ROWS_MAX) or 1
        return [_joined(self.columns[at : at + size]) for at in range(0, len(self.columns), size)]

    @property
    def sum(self) -> Column:
        return _joined(self.columns)


def make_chart(buckets: Iterable[SeriesBucket], *, since: float, until: float) -> Chart:
    """Spreads buckets over columns of equal width. A bucket that reaches into several columns is
    shared out by time."""
    span = max(_MINUTE_S, until - since)
    count = min(COLUMNS_MAX, math.ceil(span / _MINUTE_S))
    width = span / count
    columns = [
        Column(since + number * width, min(until, since + (number + 1) * width))
        for number in range(count)
    ]
    for bucket in buckets:
        _spread(columns, bucket, since, width)
    return Chart(columns=columns, since=_instant(since), until=_instant(until))


def _spread(columns: list[Column], bucket: SeriesBucket, since: float, width: float) -> None:
    begins, ends = seconds_of(bucket.since), seconds_of(bucket.until)
    length = max(0.001, ends - begins)
    latest = len(columns) - 1
    first = min(latest, max(0, math.floor((begins - since) / width)))
    last = min(latest, math.floor((ends - since) / width))
    for number in range(first, last + 1):
        starts_at = since + number * width
        overlap = min(ends, starts_at + width) - max(begins, starts_at)
        # A bucket without length belongs to the column in which it lies.
        share = overlap / length if ends > begins else 1.0
        if share > 0:
            columns[number].add(bucket, min(1.0, share))


def _joined(columns: Sequence[Column]) -> Column:
    if not columns:
        return Column(0.0, 0.0)
    whole = Column(columns[0].since, columns[-1].until)
    for column in columns:
        whole.successful += column.successful
        whole.failed += column.failed
        whole.bytes += column.bytes
        whole.credits += column.credits
        whole.cost += column.cost
        whole.reasons.update(column.reasons)
    return whole


def seconds_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
