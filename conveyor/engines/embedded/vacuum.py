"""Vacuum: the database file gives room back that deleted rows left (docs/storage.md, SQLite files).

A file of this release is shrunk in small steps, each a transaction like any other (SQLite's
incremental vacuum). A file that an earlier release made cannot be, so it is rewritten once, at a
start, where enough of it is free to be worth the time and the disk has room for a second copy.
"""

from __future__ import annotations

import logging
from sqlite3 import Connection

from conveyor.engines.embedded.space import Space

log = logging.getLogger(__name__)

# Moved in one step: about 5 ms during which nothing else is written.
STEP_PAGES = 256
# Left for the next rows: a file that is used is not shrunk and grown again all the time.
SLACK_PAGES = 256

_INCREMENTAL = 2
# A rewrite takes about a second for 200 MB, and its process serves nobody meanwhile.
_REWRITE_BYTES_MAX = 2 * 1024 * 1024 * 1024
_WORTHWHILE_SHARE = 4


def free_pages(connection: Connection) -> int:
    """How many pages the file could give back in steps."""
    if _read(connection, "auto_vacuum") != _INCREMENTAL:
        return 0
    return max(0, _read(connection, "freelist_count") - SLACK_PAGES)


def shrink_step(connection: Connection) -> None:
    # A page a row, of a statement without columns: `execute` would stop after the first.
    connection.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES})")


def rewrite_once(connection: Connection, space: Space) -> None:
    """Makes a file of an earlier release one that can be shrunk, if that is worth it now."""
    if _read(connection, "auto_vacuum") == _INCREMENTAL:
        return
    pages, page_bytes = _read(connection, "page_count"), _read(connection, "page_size")
    size_bytes = pages * page_bytes
    is_worthwhile = _read(connection, "freelist_count") * _WORTHWHILE_SHARE >= pages
    # The copy is written to a temporary file first, then to the log, then into the database.
    if is_worthwhile and size_bytes <= _REWRITE_BYTES_MAX and space.has_room(2 * size_bytes):
        log.warning("the database is rewritten to give room back", extra={"bytes": size_bytes})
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")


def _read(connection: Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
