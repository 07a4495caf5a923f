"""Measures the CPU time of one request with our pool, aiohttp and httpx as the number in flight
grows.

Each client fetches 20 KB pages over persistent connections, plain and TLS, from local origins
without think time. Each runs in its own process, and only that process is measured; aiohttp runs on
uvloop. A round measures all clients one after the other, and ratios are taken within a round, so
that other load on the machine slows both sides. Medians are shown. httpx is omitted where it would
take minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench import certificate
from bench.httpclient_variants import BODY_BYTES
from bench.origin import running_origin
from bench.svg_chart import Panel, draw, figure_path, is_full_run

FLIGHTS = (1, 16, 64, 200, 1_000)
TLS_FLIGHTS = (16, 200, 1_000)
HTTPX_FLIGHTS_MAX = 200
HTTPX_COUNT_MAX = 200
CLIENTS = ("pool", "aiohttp", "httpx")

Rounds = dict[str, list[float]]


class Point(msgspec.Struct, frozen=True):
    """One case: scheme and number in flight, and the microseconds of each client by round."""

    scheme: str
    inflight: int
    rounds: Rounds

    def us(self, client: str) -> float:
        return median(self.rounds[client])

    def ratio(self, client: str) -> float:
        """Returns the CPU time of the pool as a multiple of that of `client`."""
        return median(_ratios(self.rounds["pool"], self.rounds[client]))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench httpclient", description=__doc__)
    parser.add_argument("--n", type=int, default=6_000, help="requests per point")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    points = _measure(options.n, options.rounds)
    _show(points)
    panels = [
        Panel(
            f"{point.scheme}, {point.inflight:,} in flight",
            [(client, point.us(client)) for client in point.rounds],
            "us",
        )
        for point in points
    ]
    figure = figure_path("httpclient", is_full_run=is_full_run(parser, options))
    draw(figure, "CPU per request (20 KB)", panels)
    if options.json:
        print(msgspec.json.encode(_summary(points)).decode())


def _measure(count: int, rounds: int) -> list[Point]:
    cases = [("http", inflight) for inflight in FLIGHTS]
    cases += [("https", inflight) for inflight in TLS_FLIGHTS]
    points = [Point(scheme, inflight, {}) for scheme, inflight in cases]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_origin(size_bytes=BODY_BYTES, think_s=0.0) as plain,
    ):
        ca, proof = certificate.make(Path(folder))
        with running_origin(size_bytes=BODY_BYTES, think_s=0.0, proof=proof) as tls:
            for _ in range(rounds):
                for point in points:
                    _add_round(point, tls if point.scheme == "https" else plain, count, ca)
    return points


def _add_round(point: Point, url: str, count: int, ca: Path) -> None:
    for client in CLIENTS:
        if client == "httpx":
            if point.inflight > HTTPX_FLIGHTS_MAX:
                continue
            count = min(count, HTTPX_COUNT_MAX)
        arguments = (client, url, str(count), str(point.inflight), str(ca))
        command = (sys.executable, "-m", "bench.httpclient_variants", *arguments)
        spent = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        point.rounds.setdefault(client, []).append(float(spent))


def _show(points: Sequence[Point]) -> None:
    print(f"{'CPU us per request':20}" + "".join(f"{client:>10}" for client in CLIENTS), end="")
    print(f"{'to aiohttp':>13}{'to httpx':>12}")
    for point in points:
        cells = [f"{point.us(c):>10.0f}" if c in point.rounds else f"{'-':>10}" for c in CLIENTS]
        print(
            f"{point.scheme:6}{point.inflight:>6,} in flight  ".ljust(20) + "".join(cells), end=""
        )
        print(f"{point.ratio('aiohttp'):>12.2f}x", end="")
        print(f"{point.ratio('httpx'):>11.3f}x" if "httpx" in point.rounds else f"{'-':>12}")
    for scheme in ("http", "https"):
        print(
            f"{scheme}: a request of the pool costs {_growth(points, scheme):.2f}x at 1,000 of 16"
        )


def _growth(points: Sequence[Point], scheme: str) -> float:
    ours = {point.inflight: point.rounds["pool"] for point in points if point.scheme == scheme}
    return median(_ratios(ours[1_000], ours[16]))


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _summary(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    return {
        f"{point.scheme} {point.inflight}": {
            **{client: round(point.us(client), 1) for client in point.rounds},
            **{f"to {c}": round(point.ratio(c), 3) for c in CLIENTS[1:] if c in point.rounds},
        }
        for point in points
    } | {"growth": {scheme: round(_growth(points, scheme), 2) for scheme in ("http", "https")}}
