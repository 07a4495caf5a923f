"""Clock: wall time, and a time that is never set. Sleeping is Trio's business."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Laws:

    - `now` is epoch seconds, the same for everybody who shares an engine, give or take. It may be
      set forward or back at any moment, by any amount.
    - `steady` counts seconds and is never set: the same for all processes of one machine, and
      without meaning after that machine has started anew.
    """

    def now(self) -> float: ...

    def steady(self) -> float: ...
