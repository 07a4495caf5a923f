"""Measures the CPU time of one call to AWS with our client, and with aioboto3 on trio-asyncio.

Each arm makes calls to a stub on loopback, 16 in flight. `lean` is our transport alone, `seam` is
the same transport behind the retrying client that the engine calls, `metered` adds the usage meter.
Each arm runs in its own process, and only that process is measured. A round measures all arms one
after the other, ratios are taken within a round, and the medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

import msgspec

from bench.aws_stub import running_stub
from bench.awsclient_variants import CALLS
from bench.svg_chart import Panel, draw, figure_path, is_full_run

ARMS = ("lean", "seam", "metered", "aioboto3")
INFLIGHT = 16
# aioboto3 needs some milliseconds a call, so a tenth of the calls gives the same precision.
SLOW_SHARE = 10

Rounds = dict[str, list[float]]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench awsclient", description=__doc__)
    parser.add_argument("--n", type=int, default=4_000, help="calls per point")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    points: dict[str, Rounds] = {operation: {arm: [] for arm in ARMS} for operation in CALLS}
    with running_stub() as url:
        for _ in range(options.rounds):
            for operation, rounds in points.items():
                for arm in ARMS:
                    rounds[arm].append(_run(arm, operation, url, options.n))
    _show(points)
    panels = [
        Panel(operation, [(arm, median(taken)) for arm, taken in rounds.items()], "us")
        for operation, rounds in points.items()
    ]
    figure = figure_path("awsclient", is_full_run=is_full_run(parser, options))
    draw(figure, "CPU per call to AWS", panels)
    if options.json:
        print(msgspec.json.encode(_summary(points)).decode())


def _run(arm: str, operation: str, url: str, count: int) -> float:
    count = count // SLOW_SHARE if arm == "aioboto3" else count
    command = (sys.executable, "-m", "bench.awsclient_variants", arm, operation, url, str(count))
    done = subprocess.run((*command, str(INFLIGHT)), check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


def _ratio(rounds: Rounds, arm: str) -> float:
    """Returns the CPU time of `arm` as a share of aioboto3's: the median of the rounds."""
    pairs = zip(rounds[arm], rounds["aioboto3"], strict=True)
    return median([ours / theirs for ours, theirs in pairs])


def _show(points: dict[str, Rounds]) -> None:
    print(f"{'CPU us per call':18}" + "".join(f"{arm:>10}" for arm in ARMS), end="")
    print("".join(f"{arm + ' ratio':>15}" for arm in ARMS[:-1]))
    for operation, rounds in points.items():
        print(f"{operation:18}" + "".join(f"{median(rounds[arm]):>10.0f}" for arm in ARMS), end="")
        print("".join(f"{_ratio(rounds, arm):>14.3f}x" for arm in ARMS[:-1]))


def _summary(points: dict[str, Rounds]) -> dict[str, dict[str, float]]:
    return {
        operation: {
            **{arm: round(median(rounds[arm]), 1) for arm in ARMS},
            **{f"{arm} ratio": round(_ratio(rounds, arm), 4) for arm in ARMS[:-1]},
        }
        for operation, rounds in points.items()
    }
