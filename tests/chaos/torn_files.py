"""Tearing what lies on disk, as a loss of power does: the log at any byte, packs at their end.

A body is on disk before the row that names it: so a pack is torn only behind what the rows of the
torn log still name.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from random import Random

WAL = "conveyor.db-wal"


def tear_log(image: Path, draw: Random, *, keep_bytes: int) -> int:
    """Cuts the log behind `keep_bytes`, or overwrites some of it; answers where."""
    path = image / WAL
    size_bytes = path.stat().st_size
    at = draw.randrange(keep_bytes, size_bytes)
    with path.open("r+b") as file:
        if draw.random() < 0.5:
            file.truncate(at)
        else:
            file.seek(at)
            file.write(draw.randbytes(min(draw.randrange(1, 10_000), size_bytes - at)))
    return at


def tear_packs(image: Path, draw: Random) -> int:
    """Cuts each pack somewhere behind the last body that a row names; answers how many bytes."""
    named = _sizes_by_name(image)
    lost = 0
    for path in sorted((image / "blobs").rglob("*.,*")):
        size_bytes = path.stat().st_size
        cut_at = draw.randint(named.get(path, 0), size_bytes)
        with path.open("r+b") as file:
            file.truncate(cut_at)
        lost += size_bytes - cut_at
    return lost


def _sizes_by_name(image: Path) -> dict[Path, int]:
    """How far each pack is named; read from a copy, as reading a log may end it."""
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
