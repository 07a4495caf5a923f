"""Backup of a data directory while a process uses it, and its restoration
(docs/deploy.md, Backup and restore).

The order makes the copy consistent. The database is copied first, as one read transaction. Every
body that its rows name was durable before the row, and bodies never change: files appear whole,
and packs only grow. So the bodies that are copied afterwards include all that the rows need,
except those of jobs that were deleted in between. The copy is then verified body by body.

A backup is a directory like a data directory, plus `backup.json` with the digest of every file. It
appears under its name only when it is complete and verified.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from conveyor import __version__
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Result
from conveyor.engines.executor import sync_directory
from conveyor.engines.sqlite.blobs import path_of_file
from conveyor.engines.sqlite.pack_files import Place, packed_place

MANIFEST = "backup.json"
_DATABASE = "conveyor.db"
_SECRETS = ("secret.key", "secret.check")
_PIECE_BYTES = 1024 * 1024
_RESULT = msgspec.json.Decoder(Result)


class BackupFailed(ConveyorError):
    """The backup cannot be made, is damaged, or cannot be restored here."""


class CopiedFile(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`removed` counts bodies that were deleted from the data directory during the backup."""

    version: str
    schema: int
    tasks: int
    bodies: int
    removed: int
    files: dict[str, CopiedFile]


def back_up(data_dir: Path, target: Path) -> Manifest:
    """Copies a data directory that may be in use to `target`, which must not exist.

    The verification reads every body that a row names. Raises BackupFailed, and then leaves
    nothing under `target`.
    """
    if not (data_dir / _DATABASE).exists():
        raise BackupFailed(f"{data_dir} has no database: nothing to back up")
    if target.exists():
        raise BackupFailed(f"{target} exists: choose another name")
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(mode=0o700, parents=True)
        _copy_database(data_dir / _DATABASE, draft / _DATABASE)
        files = {_DATABASE: _describe(draft / _DATABASE)}
        for name in [*_SECRETS, *_blob_names(data_dir)]:
            copied = _copy_file(data_dir / name, draft / name)
            if copied is not None:
                files[name] = copied
        manifest = _verify_rows(draft, data_dir, files)
        _write_manifest(draft, manifest)
        _sync_tree(draft)
        draft.rename(target)
        sync_directory(str(target.absolute().parent))
    except (OSError, sqlite3.Error) as error:
        raise BackupFailed(f"the backup was not made: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def restore(backup: Path, data_dir: Path) -> Manifest:
    """Copies a backup to a data directory that has no database yet, and checks every digest."""
    manifest = read_manifest(backup)
    if data_dir.exists() and any(data_dir.iterdir()):
        raise BackupFailed(f"{data_dir} is not empty: restore into another directory")
    draft = data_dir.with_name(f".{data_dir.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(mode=0o700, parents=True)
        for name, recorded in manifest.files.items():
            if _copy_file(backup / name, draft / name) != recorded:
                raise BackupFailed(
                    f"{backup / name} is damaged: its digest is not the recorded one"
                )
        _sync_tree(draft)
        # An empty directory, such as the mount point of a volume, is filled, not replaced.
        if data_dir.exists():
            for entry in sorted(draft.iterdir()):
                entry.rename(data_dir / entry.name)
        else:
            draft.rename(data_dir)
        sync_directory(str(data_dir))
    except OSError as error:
        raise BackupFailed(f"the backup was not restored: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def read_manifest(backup: Path) -> Manifest:
    try:
        return msgspec.json.decode((backup / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise BackupFailed(f"{backup} is not a complete backup: {error}") from error


def _copy_database(source: Path, target: Path) -> None:
    """Copies the database in one step. A copy in several steps would start over with every
    commit of another process."""
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as live,
        closing(sqlite3.connect(target)) as copy,
    ):
        os.chmod(target, 0o600)
        live.backup(copy, pages=-1)
        # The copy is one file: a write-ahead log beside it could be forgotten.
        copy.execute("PRAGMA journal_mode = DELETE")
        (state,) = copy.execute("PRAGMA integrity_check").fetchone()
        if state != "ok":
            raise BackupFailed(f"the database is damaged: {state}")


def _blob_names(data_dir: Path) -> Iterator[str]:
    for directory, _, files in os.walk(data_dir / "blobs"):
        for file in sorted(files):
            yield str(Path(directory, file).relative_to(data_dir))


def _copy_file(source: Path, target: Path) -> CopiedFile | None:
    """Copies a file that may grow or disappear meanwhile. Returns None if it does not exist."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size_bytes = hashlib.sha256(), 0
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        return None
    private = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with reading, os.fdopen(private, "wb") as writing:
        while piece := reading.read(_PIECE_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())
    return CopiedFile(size_bytes, digest.hexdigest())


def _describe(path: Path) -> CopiedFile:
    with path.open("rb") as file:
        return CopiedFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _verify_rows(copy: Path, data_dir: Path, files: dict[str, CopiedFile]) -> Manifest:
    """Reads every body that a row of the copy names. A body that is missing in the data directory
    too was deleted during the backup."""
    tasks = bodies = removed = 0
    with closing(sqlite3.connect(copy / _DATABASE)) as database:
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        for (text,) in database.execute("SELECT result FROM tasks"):
            tasks += 1
            if text is None:
                continue
            result = _RESULT.decode(text)
            if _is_intact(copy, result):
                bodies += 1
            elif _is_intact(data_dir, result):
                raise BackupFailed(f"the body {result.key} is not in the backup")
            else:
                removed += 1
    return Manifest(
        version=__version__, schema=schema, tasks=tasks, bodies=bodies, removed=removed, files=files
    )


def _is_intact(data_dir: Path, result: Result) -> bool:
    root = str(data_dir / "blobs")
    place = packed_place(root, result.key)
    if place is None:
        place = Place(path_of_file(root, result.key), 0, result.size_bytes)
    try:
        with open(place.path, "rb") as file:
            file.seek(place.offset)
            body = file.read(place.size_bytes)
    except FileNotFoundError:
        return False
    return hashlib.sha256(body).hexdigest() == result.sha256


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    with (directory / MANIFEST).open("xb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(root: Path) -> None:
    for directory, _, _ in os.walk(root):
        sync_directory(directory)
