"""Damages files as a power loss does: the log at any byte, packs at their end.

A body is synced before the row that names it is written, so a pack is torn only after the last body
that the rows of the torn log name.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from random import Random

WAL = "conveyor.db-wal"


def tear_log(image: Path, randomness: Random, *, keep_bytes: int) -> int:
    """Truncates or overwrites the log after `keep_bytes`. Returns the position."""
    path = image / WAL
    size_bytes = path.stat().st_size
    at = randomness.randrange(keep_bytes, size_bytes)
    with path.open("r+b") as file:
        if randomness.random() < 0.5:
            file.truncate(at)
        else:
            file.seek(at)
            file.write(randomness.randbytes(min(randomness.randrange(1, 10_000), size_bytes - at)))
    return at


def tear_packs(image: Path, randomness: Random) -> int:
    """Truncates each pack after the last body that a row names. Returns the bytes removed."""
    named = _sizes_by_name(image)
    lost = 0
    for path in sorted((image / "blobs").rglob("*.,*")):
        size_bytes = path.stat().st_size
        cut_at = randomness.randint(named.get(path, 0), size_bytes)
        with path.open("r+b") as file:
            file.truncate(cut_at)
        lost += size_bytes - cut_at
    return lost


def _sizes_by_name(image: Path) -> dict[Path, int]:
    """Returns the end of the last named body of each pack. Reads a copy, as opening changes it."""
    copy = image.parent / "copy"
    copy.mkdir()
    for name in ("conveyor.db", WAL):
        shutil.copy(image / name, copy / name)
    named: dict[Path, int] = {}
    with sqlite3.connect(copy / "conveyor.db") as db:
        for (result,) in db.execute("SELECT result FROM tasks WHERE result IS NOT NULL"):
            prefix, _, last = json.loads(result)[0].rpartition("/")
            mark, name, offset, size_bytes = last.split(".")
            path = image / "blobs" / prefix / f"{mark}.,{name}"
            named[path] = max(named.get(path, 0), int(offset) + int(size_bytes))
    db.close()
    shutil.rmtree(copy)
    return named
