"""FileBlobs: stores each body as a file that appears whole or not at all (docs/storage.md, Blob
keys).

A put writes a temporary file, syncs it, renames it, and syncs its directory, in this order. A
rename before the sync could leave an empty file under the final name after a power cut. Without
the sync of the directory, the name itself could be lost.

A few threads take the waiting puts in batches. A batch needs one hop to a thread and one back. The
thread writes all files of the batch before it syncs the first, which halves the cost of a sync, and
syncs each directory once. A body takes 250 us in a batch and 500 us alone. Small bodies that a run
adds in large numbers go into packs instead (pack_files.py).

The body with the key `a/b/c` is the file `a/b,c`. No key contains a comma, so a file never has the
name of a directory that another key needs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NoReturn, TypeVar

import msgspec
import outcome
import trio

from conveyor.engines.executor import DiskExecutor, sync_directory
from conveyor.engines.group_commit import GroupCommit, Waiter
from conveyor.engines.packed_key import refuse_packed
from conveyor.engines.sqlite.disk_space import Space
from conveyor.engines.sqlite.errors import raise_translated_os
from conveyor.engines.sqlite.pack_files import PackFiles, Place, packed_place
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, BlobTooLarge, StorageDamaged

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,253}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*\Z")
_NAME_CHARS_MAX = 255
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# The unit of reads: larger pieces use more memory per reader, smaller ones need more hops.
_PIECE_BYTES = 256 * 1024
_THREADS_MAX = 4
# Bodies per thread and batch. A larger batch delays its first body until the last one is synced.
_BATCH_MAX = 32
# Files removed per hop to a thread, so that a call with a limit stops soon after its limit.
_DELETE_MAX = 1000
# Larger bodies get a file of their own (decision 0011).
_PACKED_BYTES_MAX = 1024 * 1024
# The length of a body that is a whole file: it ends where the file ends.
_NO_END = 1 << 62
# A concurrent delete of the prefix may remove the directory between its creation and the rename.
# More than so many collisions in a row mean another problem, and the put fails.
_LANDINGS_MAX = 3

# One counter per process, not per FileBlobs: two instances on one directory must not choose the
# same temporary name.
_NUMBERS = itertools.count()


class _Put(msgspec.Struct, eq=False):
    """One body that is being stored: first in memory, then in `temp`, then at `path`."""

    key: str
    directory: str
    path: str
    parts: Sequence[bytes]
    temp: str = ""
    descriptor: int | None = None
    size_bytes: int = 0
    sha256: str = ""


_Waiter = Waiter[_Put, Stored]


class FileBlobs:
    def __init__(
        self,
        data_dir: Path,
        random: Random,
        executor: DiskExecutor,
        space: Space,
        *,
        owner: str = "",
    ) -> None:
        """`owner` names this process where processes of several machines or containers share the
        directory: their process ids may be equal."""
        self._owner = owner
        self._root = str(data_dir / "blobs")
        self._temp_dir = str(data_dir / "temp")
        self._space = space
        self._executor = executor
        self._groups: GroupCommit[_Put, Stored] = GroupCommit(
            self._start_batch, group_max=_BATCH_MAX, concurrent_groups_max=_THREADS_MAX
        )
        self._durable_dirs = {self._root}
        self._packs = PackFiles(
            self._root, random, self._make_directory, executor, check_room=space.check_body
        )

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        refuse_packed(key)
        try:
            return await self._groups.write(_Put(key, *self._place(key), parts))
        except OSError as error:
            raise_translated_os(error)

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        refuse_packed(key)
        directory, path = self._place(key)
        scratch = await run_blocking(
            self._executor, Scratch, self._temp_name(), self._space.check_body
        )
        try:
            # `fill` syncs the file. The rename follows, and then the sync of the directory.
            await fill(self._executor, scratch, pieces)
            await run_blocking(
                self._executor, self._rename_into_place, scratch.path, directory, path
            )
            await run_blocking(self._executor, sync_directory, directory)
        finally:
            scratch.close()
            scratch.discard()  # After a successful rename there is nothing left to discard.
        return Stored(key, scratch.size_bytes, scratch.sha256)

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        refuse_packed(to)
        _, path = self._place(key)
        try:
            size_bytes, sha256 = await self._executor.run(
                self._copy, path, *self._place(to), bytes_max
            )
        except FileNotFoundError as error:
            self._raise_missing(key, error)
        except OSError as error:
            raise_translated_os(error)
        return Stored(to, size_bytes, sha256)

    async def upload_url(self, key: str, *, content_type: str, expires_at: float) -> str | None:
        _check(key)
        await trio.lowlevel.checkpoint()
        return None

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str | None:
        _check(key)
        await trio.lowlevel.checkpoint()
        return None

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        _check(f"{prefix}/{name}")
        if sum(map(len, parts)) > _PACKED_BYTES_MAX:
            return await self.put(f"{prefix}/{name}", parts)
        return await self._packs.add(prefix, parts)

    def check_room(self) -> None:
        self._space.check_fetch()

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        place = place_in(self._root, key)
        left = place.size_bytes - start
        try:
            file, piece = await self._executor.run(
                _open_at, place.path, place.offset + start, min(left, _PIECE_BYTES)
            )
        except FileNotFoundError as error:
            self._raise_missing(key, error)
        except OSError as error:
            raise_translated_os(error)
        try:
            while piece:
                yield piece
                left -= len(piece)
                # A stored body never grows, so a short piece is the last one. This saves the read
                # that would return nothing.
                size = min(left, _PIECE_BYTES) if len(piece) == _PIECE_BYTES else 0
                piece = await self._executor.run(file.read, size) if size else b""
            # A packed body has a known length. Of a whole file `left` stays near `_NO_END`.
            if 0 < left < _NO_END // 2:
                raise StorageDamaged(f"{key} has {left} bytes too few")
        except OSError as error:
            raise_translated_os(error)
        finally:
            file.close()

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        _check(prefix)
        # Open packs are closed first: the space of a deleted file is freed only after its last
        # descriptor is closed.
        self._packs.release(prefix)
        gone = 0
        try:
            while removed := await self._executor.run(self._delete_some, prefix):
                gone += removed
                if limit is not None and gone >= limit:
                    break
        except OSError as error:
            raise_translated_os(error)
        return gone

    async def wait_until_at_rest(self) -> None:
        """Returns when no thread is running, including threads of cancelled puts."""
        await self._groups.wait_until_at_rest()
        await self._packs.wait_until_at_rest()
        self._packs.close()

    def _place(self, key: str) -> tuple[str, str]:
        return _place(self._root, key)

    def _start_batch(self) -> None:
        batch = self._groups.take()
        self._executor.start(partial(self._store, batch), self._end_batch)

    def _end_batch(self, batch: outcome.Outcome[list[_Waiter]]) -> None:
        self._groups.end(batch.unwrap())

    def _store(self, batch: list[_Waiter]) -> list[_Waiter]:
        going = [waiter for waiter in batch if waiter.task is not None]
        # Each step runs for the whole batch before the next step starts: when the first file is
        # synced, the data of all files is already with the kernel.
        for step in (self._write, _sync, self._land_put):
            going = [waiter for waiter in going if _succeeds(step, waiter)]
        by_directory: dict[str, list[_Waiter]] = {}
        for waiter in going:
            by_directory.setdefault(waiter.write.directory, []).append(waiter)
        for directory, waiters in by_directory.items():
            synced = outcome.capture(sync_directory, directory)
            for waiter in waiters:
                if isinstance(synced, outcome.Error):
                    # An outcome can be unwrapped only once, so each caller gets its own.
                    waiter.result = outcome.Error(synced.error)
                else:
                    put = waiter.write
                    waiter.result = outcome.Value(Stored(put.key, put.size_bytes, put.sha256))
        return batch

    def _write(self, put: _Put) -> None:
        self._space.check_body(sum(map(len, put.parts)))
        put.temp = self._temp_name()
        put.descriptor = os.open(put.temp, _NEW_FILE, 0o600)
        digest = hashlib.sha256()
        for part in put.parts:
            digest.update(part)
            put.size_bytes += len(part)
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(put.descriptor, rest) :]
        put.sha256 = digest.hexdigest()

    def _temp_name(self) -> str:
        return f"{self._temp_dir}/{self._owner}{os.getpid()}-{next(_NUMBERS)}"

    def _land_put(self, put: _Put) -> None:
        self._rename_into_place(put.temp, put.directory, put.path)

    def _rename_into_place(self, temp: str, directory: str, path: str) -> None:
        for _ in range(_LANDINGS_MAX):
            self._make_directory(directory)
            try:
                os.rename(temp, path)
            except FileNotFoundError:  # A concurrent delete removed the directory.
                self._durable_dirs.discard(directory)
            else:
                return
        raise FileNotFoundError(path)

    def _copy(self, path: str, directory: str, to: str, bytes_max: int | None) -> tuple[int, str]:
        """Links the file to a temporary name and renames that: a link cannot replace a file."""
        temp = self._temp_name()
        os.link(path, temp)
        try:
            if bytes_max is not None and os.stat(temp).st_size > bytes_max:
                raise BlobTooLarge(to)
            digest = digest_file(temp)
            self._rename_into_place(temp, directory, to)
            sync_directory(directory)
        finally:
            # If both names already belong to the same file, POSIX makes the rename a no-op that
            # keeps the temporary name.
            with suppress(FileNotFoundError):
                os.unlink(temp)
        return digest

    def _raise_missing(self, key: str, error: FileNotFoundError) -> NoReturn:
        """A body is missing only where the others are: the volume may not be mounted."""
        if os.path.isdir(self._root):
            raise BlobMissing(key) from error
        raise_translated_os(error)

    def _make_directory(self, directory: str) -> None:
        """Makes the directory and its parents durable, parents first.

        A name is durable once its directory is synced. The root itself is never created here: if
        it is missing, its volume may not be mounted.
        """
        is_durable = directory in self._durable_dirs
        if not is_durable or (directory != self._root and not os.path.isdir(directory)):
            parent = os.path.dirname(directory)
            self._make_directory(parent)
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            sync_directory(parent)
            self._durable_dirs.add(directory)

    def _delete_some(self, prefix: str) -> int:
        """Removes some bodies under the prefix. If there are none, removes the directories."""
        above, _, last = prefix.rpartition("/")
        parent = f"{self._root}/{above}" if above else self._root
        doomed = list(islice(_bodies_under(parent, last), _DELETE_MAX))
        if not doomed:
            os.stat(self._root)  # Without its volume nothing is deleted.
        for path in doomed:
            with suppress(FileNotFoundError):
                os.unlink(path)
        if not doomed and os.path.isdir(parent):
            self._remove_directories(f"{parent}/{last}")
            sync_directory(parent)
        return len(doomed)

    def _remove_directories(self, top: str) -> None:
        for directory, _, _ in os.walk(top, topdown=False):
            # Forgotten before it is removed, so that a concurrent put creates and syncs it again.
            self._durable_dirs.discard(directory)
            with suppress(OSError):  # A concurrent put has added a file.
                os.rmdir(directory)


def place_in(root: str, key: str) -> Place:
    """Returns the place of the body with this key under `root`, whether or not it exists."""
    _check(key)
    return packed_place(root, key) or Place(_place(root, key)[1], 0, _NO_END)


def _place(root: str, key: str) -> tuple[str, str]:
    """Returns the directory and the path of the body with this key."""
    _check(key)
    above, _, last = key.rpartition("/")
    above, _, last_but_one = above.rpartition("/")
    name = f"{last_but_one},{last}"
    if len(name) > _NAME_CHARS_MAX:
        raise ValueError(f"too long a blob key: {key!r}")
    directory = f"{root}/{above}" if above else root
    return directory, f"{directory}/{name}"


def path_of_file(root: str, key: str) -> str:
    """Returns the path of the body with this key, which is not in a pack."""
    return _place(root, key)[1]


def _bodies_under(parent: str, name: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(parent) as entries:
        yield from (entry.path for entry in entries if entry.name.startswith(f"{name},"))
    for directory, _, files in os.walk(f"{parent}/{name}"):
        yield from (f"{directory}/{file}" for file in files)


def _succeeds(step: Callable[[_Put], None], waiter: _Waiter) -> bool:
    put = waiter.write
    result = outcome.capture(step, put)
    if isinstance(result, outcome.Value):
        return True
    waiter.result = result
    if put.descriptor is not None:
        os.close(put.descriptor)
    with suppress(OSError):
        os.unlink(put.temp)
    return False


def _sync(put: _Put) -> None:
    assert put.descriptor is not None
    os.fsync(put.descriptor)
    descriptor, put.descriptor = put.descriptor, None
    os.close(descriptor)


def _open_at(path: str, start: int, size: int) -> tuple[FileIO, bytes]:
    file = FileIO(path)
    file.seek(start)
    return file, file.read(max(size, 0))


def _check(key: str) -> None:
    if not _KEY.match(key):
        raise ValueError(f"not a blob key: {key!r}")


# Streams: a body of any size that arrives in pieces and still appears whole
# (docs/storage.md, Blob keys).
#
# Pieces are collected before they go to a thread, because a hop costs more than the write of a
# small piece.


T = TypeVar("T")

# Larger values use more memory per stream, smaller ones need more hops.
_GATHER_BYTES = 1024 * 1024


class Scratch:
    """A temporary file, for one thread at a time. `discard` removes it unless it was renamed."""

    def __init__(self, path: str, check_room: Callable[[int], None]) -> None:
        self.path = path
        self._check_room = check_room
        self.size_bytes = 0
        self._descriptor = os.open(path, _NEW_FILE, 0o600)
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, pieces: list[bytes]) -> None:
        self._check_room(sum(map(len, pieces)))
        for piece in pieces:
            self._digest.update(piece)
            self.size_bytes += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            Path(self.path).unlink()


async def run_blocking(executor: DiskExecutor, step: Callable[..., T], *arguments: Any) -> T:
    """Runs one blocking step and translates its OSError into an error of the port.

    Errors of the caller's iterator do not pass through here, so they stay untranslated.
    """
    try:
        return await executor.run(step, *arguments)
    except OSError as error:
        raise_translated_os(error)


async def fill(executor: DiskExecutor, scratch: Scratch, pieces: AsyncIterable[bytes]) -> None:
    """Writes all pieces and syncs the file. Errors of the iterator pass through unchanged."""
    gathered: list[bytes] = []
    size_bytes = 0
    async for piece in pieces:
        gathered.append(piece)
        size_bytes += len(piece)
        if size_bytes >= _GATHER_BYTES:
            await run_blocking(executor, scratch.write, gathered)
            gathered, size_bytes = [], 0
    await run_blocking(executor, scratch.write, gathered)
    await run_blocking(executor, scratch.sync)


def digest_file(path: str) -> tuple[int, str]:
    """Returns the length of a file and its SHA-256."""
    digest, size_bytes = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while data := file.read(_GATHER_BYTES):
            digest.update(data)
            size_bytes += len(data)
    return size_bytes, digest.hexdigest()
