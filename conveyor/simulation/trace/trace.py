"""The trace: what each part of a world did, at which virtual time, and a hash over all of it
(docs/simulator.md)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import trio


@dataclass(frozen=True, slots=True)
class Line:
    """One event. `is_minor` lines are left out of a summary. `is_fault` lines report a call that
    failed because of an injected fault."""

    at: float
    who: str
    what: str
    detail: str
    is_minor: bool
    is_fault: bool = False

    def __str__(self) -> str:
        return f"{self.at:12.4f}  {self.who:<12} {self.what:<22} {self.detail}"


class Trace:
    """Collects the lines of one world and hashes them as they come."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def note(
        self,
        who: str,
        what: str,
        detail: str = "",
        *,
        is_minor: bool = False,
        is_fault: bool = False,
    ) -> None:
        at = trio.current_time()
        self._hash.update(f"{at:.6f} {who} {what} {detail}\n".encode())
        self.lines.append(Line(at, who, what, detail, is_minor, is_fault))

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()
