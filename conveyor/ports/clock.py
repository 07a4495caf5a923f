"""Clock: wall time, and a time that is never set. Sleeping is done by Trio."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Laws:

    - `now` is epoch seconds, about the same for all processes that share an engine. It may be set
      forward or back at any moment, by any amount.
    - `steady` counts seconds and is never set. It is the same for all processes of one machine, and
      has no meaning after a restart of that machine.
    """

    def now(self) -> float: ...

    def steady(self) -> float: ...
