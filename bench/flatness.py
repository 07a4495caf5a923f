"""Measures whether a page costs the same in a list of 1,000 pages and in a list of 100,000.

Conveyor runs alone in one process, and everything counts: opening the data directory, submitting
the list, every page, closing. The CPU time of a list with one page is the start. The cost of a page
is shown without the start and with it. The sizes take turns and medians are shown, because the
speed of a shared machine changes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec

from bench.origin import running_origin
from bench.svg_chart import Panel, draw, figure_path, is_full_run
from bench.throughput import run_arm
from bench.throughput_variants import Measured

# In a round, a small size runs as often as it takes to fetch this many pages,
PAGES_A_ROUND = 10_000
# but not more often than this.
RUNS_A_ROUND = 10


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench flatness", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    if min(options.sizes) < 2:
        parser.error("--sizes: each at least 2, because the first page counts as the start")
    starts: list[Measured] = []
    measured: dict[int, list[Measured]] = {size: [] for size in options.sizes}
    with running_origin(size_bytes=20_000, think_s=0.05) as url:
        for _ in range(options.rounds):
            starts += _runs(url, 1, options.concurrency)
            for size in options.sizes:
                measured[size] += _runs(url, size, options.concurrency)
    flatness = compute_flatness(starts, measured)
    show(flatness, measured)
    bars = [(f"{size:,} pages", cost) for size, cost in flatness.page_ms.items()]
    panels = [
        Panel("CPU per page after the first", bars, "ms"),
        Panel("CPU of a list of one page", [("start", flatness.start_ms)], "ms"),
    ]
    figure = figure_path("flatness", is_full_run=is_full_run(parser, options))
    draw(figure, "One process, 20 KB pages", panels)
    if options.json:
        print(msgspec.json.encode(json_line(flatness, measured)).decode())


def _runs(url: str, size: int, concurrency: int) -> Iterator[Measured]:
    for _ in range(min(RUNS_A_ROUND, max(1, PAGES_A_ROUND // size))):
        os.sync()  # Writes that the previous run left to the kernel are not a cost of this run.
        yield run_arm("conveyor", url, size, concurrency)


class Flatness(msgspec.Struct, frozen=True):
    """Milliseconds a page by size: after the first page, and with the start divided among all."""

    start_ms: float
    page_ms: Mapping[int, float]
    whole_ms: Mapping[int, float]


def compute_flatness(
    starts: Sequence[Measured], measured: Mapping[int, Sequence[Measured]]
) -> Flatness:
    start_ms = median(start.cpu_s for start in starts) * 1000
    whole = {size: median(run.cpu_ms_per_page for run in runs) for size, runs in measured.items()}
    pages = {size: (cost * size - start_ms) / (size - 1) for size, cost in whole.items()}
    return Flatness(start_ms, pages, whole)


def json_line(
    flatness: Flatness, measured: Mapping[int, Sequence[Measured]]
) -> Mapping[str, object]:
    """Returns the figures of the JSON line. `cost_ratio` compares the largest size with the
    smallest, `cost_spread` the most expensive with the cheapest."""
    costs = flatness.page_ms
    return {
        "sizes": list(costs),
        "start_ms": round(flatness.start_ms, 1),
        "cost_ms": [round(cost, 4) for cost in costs.values()],
        "cost_ratio": round(costs[max(costs)] / costs[min(costs)], 3),
        "cost_spread": round(spread(costs), 3),
        "spread_with_start": round(spread(flatness.whole_ms), 3),
        "rss_mb": round(max(run.rss_mb for runs in measured.values() for run in runs), 1),
    }


def spread(costs: Mapping[int, float]) -> float:
    return max(costs.values()) / min(costs.values())


def show(flatness: Flatness, measured: Mapping[int, Sequence[Measured]]) -> None:
    first = flatness.page_ms[min(measured)]
    print(
        f"{'pages':>9}{'CPU ms':>9}{'ratio':>8}{'with start':>12}{'spread':>15}"
        f"{'pages/s':>9}{'RSS MB':>8}{'runs':>6}"
    )
    for size, runs in measured.items():
        costs_ms = [run.cpu_ms_per_page for run in runs]
        print(
            f"{size:>9,}{flatness.page_ms[size]:>9.3f}{flatness.page_ms[size] / first:>7.2f}x"
            f"{flatness.whole_ms[size]:>12.3f}{f'{min(costs_ms):.3f}-{max(costs_ms):.3f}':>15}"
            f"{median(run.pages_per_s for run in runs):>9,.0f}"
            f"{max(run.rss_mb for run in runs):>8.0f}{len(runs):>6}"
        )
    print(
        f"a list of one page takes {flatness.start_ms:.0f} ms; without it a page of the most "
        f"expensive size costs {spread(flatness.page_ms):.3f}x a page of the cheapest, with it "
        f"{spread(flatness.whole_ms):.3f}x"
    )
