"""DamageLog: logs each stored row that cannot be decoded, once (docs/storage.md, Damaged rows)."""

from __future__ import annotations

import logging

from conveyor.ports.errors import RowDamaged

log = logging.getLogger(__name__)

# Bounds the log and the set of logged rows. An operator with more damaged rows needs no longer
# list.
_ROWS_MAX = 1_000


class DamageLog:
    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def note_skipped(self, error: RowDamaged) -> None:
        """Logs a row that a `find` left out."""
        row = (error.kind, error.address)
        if row not in self._told and len(self._told) < _ROWS_MAX:
            self._told.add(row)
            log.error("damaged row skipped: %s", error)
