"""Clock: wall time. Sleeping is Trio's business."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Law: `now` is epoch seconds, the same for everybody who shares an engine, give or take."""

    def now(self) -> float: ...
