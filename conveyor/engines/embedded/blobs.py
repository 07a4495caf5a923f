"""FileBlobs: each body a file that appears whole: temp, fsync, rename, fsync of its directory.

Puts that wait are taken together by a few threads; each batch pays one hop each way, and one
fsync for each directory it touched (SPEC 5.5).

The key `a/b/c` lies in the file `a/b,c`. No key has a comma in it, so a file never stands where
another key needs a directory.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
import outcome
import trio

from conveyor.engines.embedded.errors import raise_translated_os
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, Unavailable

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,253}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*\Z")
_NAME_CHARS_MAX = 255
_PIECE_BYTES = 256 * 1024
_THREADS_MAX = 4
_BATCH_MAX = 32
_DELETE_MAX = 1000
_LANDINGS_MAX = 3


_UNKNOWN = outcome.Error(Unavailable("not stored"))


class _Put(msgspec.Struct, eq=False):
    path: Path
    parts: Sequence[bytes]
    task: trio.lowlevel.Task | None
    result: outcome.Outcome[Stored] = _UNKNOWN

    def leave(self, _: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class FileBlobs:
    def __init__(self, root: Path, temp_dir: Path) -> None:
        self._root = root
        self._temp_dir = temp_dir
        self._token = trio.lowlevel.current_trio_token()
        self._numbers = itertools.count()
        self._waiting: deque[_Put] = deque()
        self._threads_count = 0
        self._durable_dirs = {root}

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        put = _Put(self._path(key), parts, trio.lowlevel.current_task())
        self._waiting.append(put)
        if self._threads_count < _THREADS_MAX:
            # Not at once: whoever else is about to put in this turn comes along.
            self._token.run_sync_soon(self._muster, idempotent=True)
        try:
            stored: Stored = await trio.lowlevel.wait_task_rescheduled(put.leave)
        except OSError as error:
            raise_translated_os(error)
        return stored

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        path = self._path(key)
        try:
            file, piece = await trio.to_thread.run_sync(_open_at, path, start)
        except FileNotFoundError as error:
            raise BlobMissing(key) from error
        except OSError as error:
            raise_translated_os(error)
        try:
            while piece:
                yield piece
                # A short piece is the last one: a body never grows.
                more = len(piece) == _PIECE_BYTES
                piece = await trio.to_thread.run_sync(file.read, _PIECE_BYTES) if more else b""
        except OSError as error:
            raise_translated_os(error)
        finally:
            file.close()

    async def delete_prefix(self, prefix: str) -> int:
        _check(prefix)
        gone = 0
        try:
            while removed := await trio.to_thread.run_sync(self._delete_some, prefix):
                gone += removed
        except OSError as error:
            raise_translated_os(error)
        return gone

    def _path(self, key: str) -> Path:
        _check(key)
        *directories, last_but_one, last = ("", *key.split("/"))
        name = f"{last_but_one},{last}"
        if len(name) > _NAME_CHARS_MAX:
            raise ValueError(f"too long a blob key: {key!r}")
        return self._root.joinpath(*directories, name)

    def _muster(self) -> None:
        while self._waiting and self._threads_count < _THREADS_MAX:
            share = -(-len(self._waiting) // (_THREADS_MAX - self._threads_count))
            batch = [self._waiting.popleft() for _ in range(min(share, _BATCH_MAX))]
            self._threads_count += 1
            trio.lowlevel.start_thread_soon(partial(self._store, batch), self._report)

    def _report(self, batch: outcome.Outcome[list[_Put]]) -> None:
        self._token.run_sync_soon(self._wake, batch.unwrap())

    def _wake(self, batch: list[_Put]) -> None:
        self._threads_count -= 1
        self._muster()
        for put in batch:
            if put.task is not None:
                trio.lowlevel.reschedule(put.task, put.result)

    def _store(self, batch: list[_Put]) -> list[_Put]:
        by_directory: dict[Path, list[_Put]] = {}
        for put in batch:
            if put.task is None:
                continue
            put.result = outcome.capture(self._write, put)
            if isinstance(put.result, outcome.Value):
                by_directory.setdefault(put.path.parent, []).append(put)
        for directory, puts in by_directory.items():
            synced = outcome.capture(_sync_directory, directory)
            if isinstance(synced, outcome.Error):
                for put in puts:
                    put.result = synced
        return batch

    def _write(self, put: _Put) -> Stored:
        temp = self._temp_dir / f"{os.getpid()}-{next(self._numbers)}"
        try:
            stored = _write_durably(temp, put.parts)
            self._land(temp, put.path)
        except OSError:
            temp.unlink(missing_ok=True)
            raise
        return stored

    def _land(self, temp: Path, path: Path) -> None:
        for _ in range(_LANDINGS_MAX):
            self._make_directory(path.parent)
            try:
                temp.rename(path)
            except FileNotFoundError:  # The directory was deleted meanwhile.
                self._durable_dirs.discard(path.parent)
            else:
                return
        raise FileNotFoundError(path)

    def _make_directory(self, directory: Path) -> None:
        """Makes the directory and its parents; a name is durable once its directory is synced."""
        if directory not in self._durable_dirs:
            self._make_directory(directory.parent)
            directory.mkdir(mode=0o700, exist_ok=True)
            _sync_directory(directory.parent)
            self._durable_dirs.add(directory)

    def _delete_some(self, prefix: str) -> int:
        """Removes some bodies under the prefix; when there are none, the directories as well."""
        *above, last = prefix.split("/")
        parent = self._root.joinpath(*above)
        doomed = list(islice(_bodies_under(parent, last), _DELETE_MAX))
        for path in doomed:
            path.unlink(missing_ok=True)
        if not doomed and parent.is_dir():
            self._remove_directories(parent / last)
            _sync_directory(parent)
        return len(doomed)

    def _remove_directories(self, top: Path) -> None:
        for directory, _, _ in os.walk(top, topdown=False):
            self._durable_dirs.discard(Path(directory))
            with suppress(OSError):  # A put has landed in it.
                os.rmdir(directory)


def _bodies_under(parent: Path, name: str) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(parent) as entries:
        yield from (Path(entry.path) for entry in entries if entry.name.startswith(f"{name},"))
    for directory, _, files in os.walk(parent / name):
        yield from (Path(directory, file) for file in files)


def _write_durably(path: Path, parts: Sequence[bytes]) -> Stored:
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for part in parts:
            digest.update(part)
            size_bytes += len(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return Stored(size_bytes=size_bytes, sha256=digest.hexdigest())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_at(path: Path, start: int) -> tuple[BinaryIO, bytes]:
    file = path.open("rb", buffering=0)
    file.seek(start)
    return file, file.read(_PIECE_BYTES)


def _check(key: str) -> None:
    if not _KEY.match(key):
        raise ValueError(f"not a blob key: {key!r}")
