"""What does one call to AWS cost, in CPU: our lean plane, or aioboto3 through trio-asyncio?

16 in flight against a stub on loopback. Shown are the lean plane alone, the same behind the seam,
as the engine calls it, and with the meter running. Each arm runs in a process of its own and only
that one is measured; a round measures all arms one after the other, and ratios are taken within a
round. Shown are medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

import msgspec

from bench.aws_stub import a_stub
from bench.awsclient_variants import CALLS
from bench.svg_chart import Panel, draw, is_whole, place_of

ARMS = ("lean", "seam", "metered", "aioboto3")
INFLIGHT = 16
# An arm of some milliseconds a call needs fewer of them.
SLOW_SHARE = 10

Rounds = dict[str, list[float]]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench awsclient", description=__doc__)
    parser.add_argument("--n", type=int, default=4_000, help="calls per point")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    points: dict[str, Rounds] = {operation: {arm: [] for arm in ARMS} for operation in CALLS}
    with a_stub() as url:
        for _ in range(options.rounds):
            for operation, rounds in points.items():
                for arm in ARMS:
                    rounds[arm].append(_run(arm, operation, url, options.n))
    _show(points)
    panels = [
        Panel(operation, [(arm, median(taken)) for arm, taken in rounds.items()], "us")
        for operation, rounds in points.items()
    ]
    figure = place_of("awsclient", is_whole=is_whole(parser, options))
    draw(figure, "CPU per call to AWS", panels)
    if options.json:
        print(msgspec.json.encode(_summary(points)).decode())


def _run(arm: str, operation: str, url: str, count: int) -> float:
    count = count // SLOW_SHARE if arm == "aioboto3" else count
    command = (sys.executable, "-m", "bench.awsclient_variants", arm, operation, url, str(count))
    done = subprocess.run((*command, str(INFLIGHT)), check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


def _ratio(rounds: Rounds, arm: str) -> float:
    """What `arm` takes of what aioboto3 takes."""
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
