"""Runs the product with a crash switch for call sites: `python -m tests.chaos.site_program dev`.

A site is an engine's method and the product's function that calls it, as in
`store.commit@usecases.stop`. A site is reproducible. The number of a call is not, because other
tasks make calls in between.

`TEST_CRASH_AT=record:FILE` records every site that is passed. `TEST_CRASH_AT=SIDE:SITE` ends the
process when it passes that side of the site for the first time.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.crash import injection, program

SIDES = ("before", "after")
_NAMELESS = re.compile(r"\.<\w+>")  # A lambda counts as the function that contains it.
# A stream belongs to the function that opens it, even if another function reads it to its end.
_OPENED_BY = {"usecases.streams._with_first": "usecases.streams.begun"}
_WRAPPERS = {injection.__name__, "conveyor.usecases.context", __name__, "__main__"}


@dataclass(frozen=True, slots=True)
class Recorder:
    path: Path
    seen: set[str] = field(default_factory=set)

    def passes(self, call: str, side: str) -> None:
        site = site_of(call)
        if site in self.seen:
            return
        self.seen.add(site)
        with self.path.open("a") as file:
            file.write(f"{site}\n")


@dataclass(frozen=True, slots=True)
class SiteSwitch:
    side: str
    site: str

    def passes(self, call: str, side: str) -> None:
        if side == self.side and site_of(call) == self.site:
            os._exit(injection.EXIT_CODE)


def site_of(call: str) -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    if frame is None:
        return f"{call}@nobody"
    module = frame.f_globals["__name__"].removeprefix("conveyor.")
    name = f"{module}.{_NAMELESS.sub('', frame.f_code.co_qualname)}"
    return f"{call}@{_OPENED_BY.get(name, name)}"


def parse(text: str) -> Recorder | SiteSwitch:
    first, _, rest = text.partition(":")
    return Recorder(Path(rest)) if first == "record" else SiteSwitch(first, rest)


def run() -> None:
    program.run(parse)


if __name__ == "__main__":
    run()
