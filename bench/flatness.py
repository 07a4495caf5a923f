"""Does a page cost the same in a list of a thousand and of a hundred thousand?

Conveyor alone, one process, everything counted: opening the data directory, submitting the list,
every page, closing. The sizes take turns and medians count, as a shared machine changes its speed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from bench.arms import Measured
from bench.figure import Panel, draw, is_whole, place_of
from bench.origin import an_origin
from bench.throughput import run_arm

PAGES_A_ROUND = 10_000  # A small size is run as often as it takes to make this many.


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench flatness", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    measured: dict[int, list[Measured]] = {size: [] for size in options.sizes}
    with an_origin(size_bytes=20_000, think_s=0.05) as url:
        for _ in range(options.rounds):
            for size in options.sizes:
                for _ in range(max(1, PAGES_A_ROUND // size)):
                    os.sync()  # What the run before has left to write is not this one's cost.
                    measured[size].append(run_arm("conveyor", url, size, options.concurrency))
    costs = {size: median(each.cpu_ms_per_page for each in runs) for size, runs in measured.items()}
    show(measured, costs)
    bars = [(f"{size:,} pages", cost) for size, cost in costs.items()]
    figure = place_of("flatness", is_whole=is_whole(parser, options))
    draw(figure, "One process, 20 KB pages", [Panel("CPU per page", bars, "ms")])
    if options.json:
        print(msgspec.json.encode(line_of(measured, costs)).decode())


def line_of(
    measured: Mapping[int, Sequence[Measured]], costs: Mapping[int, float]
) -> dict[str, object]:
    """The largest size beside the smallest, and the dearest beside the cheapest: a hump shows."""
    return {
        "sizes": list(costs),
        "cost_ms": [round(cost, 4) for cost in costs.values()],
        "cost_ratio": round(costs[max(costs)] / costs[min(costs)], 3),
        "cost_spread": round(spread(costs), 3),
        "rss_mb": round(max(each.rss_mb for runs in measured.values() for each in runs), 1),
    }


def spread(costs: Mapping[int, float]) -> float:
    return max(costs.values()) / min(costs.values())


def show(measured: Mapping[int, Sequence[Measured]], costs: Mapping[int, float]) -> None:
    first = costs[min(costs)]
    print(
        f"{'pages':>9}{'CPU ms':>9}{'ratio':>8}{'spread':>15}{'pages/s':>9}{'RSS MB':>8}{'runs':>6}"
    )
    for size, runs in measured.items():
        each = [run.cpu_ms_per_page for run in runs]
        print(
            f"{size:>9,}{costs[size]:>9.3f}{costs[size] / first:>7.2f}x"
            f"{f'{min(each):.3f}-{max(each):.3f}':>15}"
            f"{median(run.pages_per_s for run in runs):>9,.0f}"
            f"{max(run.rss_mb for run in runs):>8.0f}{len(runs):>6}"
        )
    print(f"the dearest size takes {spread(costs):.3f}x what the cheapest does")
