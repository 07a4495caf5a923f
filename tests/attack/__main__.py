"""Runs attacks against the program and prints each figure with its bound.

`python -m tests.attack [NAME ...] [--long] [--against PYTHON] [--json]` exits with 1 if a figure is
outside its bound. `--against` is the Python of another checkout, to measure the program before a
change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.attack import arena
from tests.attack.report import Figure, Ground, Report
from tests.attack.scenarios import SCENARIOS


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--long", action="store_true", help="run the attacks at their full size")
    parser.add_argument("--against", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--minutes", type=float, default=0.0, help="duration of `soak`")
    parser.add_argument("--json", action="store_true", help="one JSON object a scenario")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - SCENARIOS.keys())
    if unknown:
        parser.error(f"no such scenario: {', '.join(unknown)}")
    if arena.INSIDE not in os.environ:
        return arena.run_inside(arguments)
    place = arena.enter()
    all_hold = True
    for name in options.names or SCENARIOS:
        report = _attack(name, place, options)
        all_hold = all_hold and all(figure.holds for figure in report.figures)
        _print(name, report, as_json=options.json)
    return 0 if all_hold else 1


def _attack(name: str, place: arena.Arena, options: argparse.Namespace) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="conveyor-attack-") as folder:
        ground = Ground(place, options.against, Path(folder), options.long, options.minutes)
        SCENARIOS[name](ground, report)
    return report


def _print(name: str, report: Report, *, as_json: bool) -> None:
    if as_json:
        figures = [
            {
                "name": figure.name,
                "value": figure.value,
                "bound": f"{figure.relation} {figure.bound:g}",
                "holds": figure.holds,
            }
            for figure in report.figures
        ]
        print(json.dumps({"scenario": name, "figures": figures}), flush=True)
        return
    print(f"\n{name}")
    for figure in report.figures:
        print(f"  {_mark(figure)} {figure.name}: {_format(figure.value)}", end="")
        print(f"  (bound: {figure.relation} {figure.bound:g})", flush=True)


def _mark(figure: Figure) -> str:
    return "ok  " if figure.holds else "FAIL"


def _format(value: float | None) -> str:
    return (
        "did not happen in time"
        if value is None
        else f"{value:.3g}"
        if value % 1
        else f"{value:.0f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
