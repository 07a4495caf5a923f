"""The program, with its crash switch set by call site: `python -m tests.chaos.site_program dev`.

A site is an engine's method and the function of ours that calls it, `store.commit@usecases.stop`.
Counting calls would not do: which is the fifth depends on what else goes on, who makes it does not.

`TEST_CRASH_AT=record:FILE` notes every site that is passed, `SIDE:SITE` ends the process when
it is there for the first time.
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
_NAMELESS = re.compile(r"\.<\w+>")  # A lambda is the function that it stands in.
# A stream that one function opens and another reads to its end has the site of the first.
_TAKEN_ON = {"usecases.streams._with_first": "usecases.streams.begun"}
_BETWEEN = {injection.__name__, "conveyor.usecases.context", __name__, "__main__"}


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
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    if frame is None:
        return f"{call}@nobody"
    module = frame.f_globals["__name__"].removeprefix("conveyor.")
    name = f"{module}.{_NAMELESS.sub('', frame.f_code.co_qualname)}"
    return f"{call}@{_TAKEN_ON.get(name, name)}"


def parse(text: str) -> Recorder | SiteSwitch:
    first, _, rest = text.partition(":")
    return Recorder(Path(rest)) if first == "record" else SiteSwitch(first, rest)


def run() -> None:
    program.run(parse)


if __name__ == "__main__":
    run()
