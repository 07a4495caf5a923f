"""Health: whether the database of a data directory can be read and written
(docs/engines.md, Room and damage)."""

from __future__ import annotations

import logging
from pathlib import Path

from conveyor.engines.embedded.errors import is_damage, is_io_error

log = logging.getLogger(__name__)


class Health:
    """Damage stays until the process is started again on a file that was mended; an I/O error is
    over with the next commit that succeeds, and so is only a warning. Each is logged once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_damaged = False
        self._has_io_error = False

    def is_sound(self) -> bool:
        return not self._is_damaged and not self._has_io_error

    def note(self, error: BaseException) -> None:
        """Keeps in mind what this error of SQLite says about the file."""
        if is_damage(error) and not self._is_damaged:
            self._is_damaged = True
            log.error(
                "the database is damaged: stop this process, copy the data directory, then restore "
                "a backup or try the .recover command of sqlite3",
                extra={"path": str(self._path), "cause": str(error)},
            )
        if is_io_error(error) and not self._has_io_error:
            self._has_io_error = True
            log.warning(
                "the disk of the database fails: see the system log for its device",
                extra={"path": str(self._path), "cause": str(error)},
            )

    def note_commit(self) -> None:
        if self._has_io_error:
            self._has_io_error = False
            log.warning("the database can be written again", extra={"path": str(self._path)})
