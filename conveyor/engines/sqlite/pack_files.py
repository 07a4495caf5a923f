"""Pack files: small bodies are appended to a few files per prefix, with one fsync for a group.

The problem: a file per body needs a create, an fsync, a rename and an fsync of the directory. That
is 300 us of CPU, as much as all other work for a page. An append to a pack takes 10 us (20 KB
bodies, groups of 50). The other alternative, bodies as SQLite blobs, writes every byte twice,
because each byte goes through the write-ahead log (decision 0011).

A body is still whole or absent:

- The thread syncs the group before any caller receives a key. A key therefore never names bytes
  that a crash can remove.
- A crash may leave a torn tail in a pack. No key names the tail, and no process appends behind it,
  because every process creates packs of its own.
- A pack is append-only. The body of a lost claim keeps its space until its run is deleted.

The key of a packed body contains its place: `<prefix>/pack.<name>.<offset>.<size>`
(docs/storage.md, Blob keys). So a read needs no index, and packs need no table that could disagree
with the files.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from random import Random

import msgspec
import outcome
import trio

from conveyor.engines.executor import DiskExecutor, sync_directory
from conveyor.engines.group_commit import GroupCommit, Waiter
from conveyor.engines.packed_key import MARK, Part, part_of
from conveyor.engines.sqlite.errors import raise_translated_os
from conveyor.ports.blobs import Stored

# A full pack is closed, and the next body starts a new one.
PACK_BYTES_MAX = 512 * 1024 * 1024
# Bounds the file descriptors. When more prefixes are active, the least recently used pack is
# closed, and the next body of its prefix starts a new file.
_OPEN_MAX = 64
# A pack without appends for so long is closed: while any process has a deleted file open, the file
# system does not free its space. A shorter time makes more files.
REST_S = 15.0
# Bodies per group. It bounds the work between two syncs, and so the delay of the first body.
_GROUP_MAX = 256
# The thread waits so long before it takes the group, so that several bodies share one sync. A
# longer wait delays every body; a shorter one makes more syncs (decision 0012).
_LINGER_S = 0.006
_PARTS_MAX = 1024  # IOV_MAX of Linux: one writev takes no more buffers.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Place(msgspec.Struct, frozen=True):
    """The file, the offset and the length of a body."""

    path: str
    offset: int
    size_bytes: int


class _Append(msgspec.Struct, frozen=True, eq=False):
    """One body to append. If its caller is cancelled, the bytes may be in a pack, but no key names
    them."""

    prefix: str
    parts: Sequence[bytes]


_Waiter = Waiter[_Append, Stored]


class _PackFile(msgspec.Struct, eq=False):
    name: str
    descriptor: int
    size_bytes: int = 0
    is_resting: bool = False


class PackFiles:
    """Writes one group at a time, in one thread.

    While `_groups` is busy only that thread uses `_packs`; otherwise only the Trio thread does. So
    `_packs` needs no lock.
    """

    def __init__(
        self,
        root: str,
        random: Random,
        make_directory: Callable[[str], None],
        executor: DiskExecutor,
        *,
        check_room: Callable[[int], None],
    ) -> None:
        self._root = root
        self._random = random
        self._make_directory = make_directory
        self._executor = executor
        self._check_room = check_room
        self._groups: GroupCommit[_Append, Stored] = GroupCommit(
            self._start_group, group_max=_GROUP_MAX
        )
        self._packs: OrderedDict[str, _PackFile] = OrderedDict()
        self._is_watching = False
        self._released: set[str] = set()

    async def add(self, prefix: str, parts: Sequence[bytes]) -> Stored:
        try:
            return await self._groups.write(_Append(prefix, parts))
        except OSError as error:
            raise_translated_os(error)

    def release(self, prefix: str) -> None:
        """Closes the packs at or under the prefix, after the current group if one is written."""
        self._released.add(prefix)
        if not self._groups.is_busy:
            self._close_released()

    async def wait_until_at_rest(self) -> None:
        await self._groups.wait_until_at_rest()

    def close(self) -> None:
        while self._packs:
            self._close(next(iter(self._packs)))

    def _start_group(self) -> None:
        self._executor.start(self._write_group, self._end_group)

    def _end_group(self, group: outcome.Outcome[list[_Waiter]]) -> None:
        # Before `end`, which starts the next group: the packs then belong to the thread again.
        self._close_released()
        if self._packs and not self._is_watching:
            self._is_watching = True
            trio.lowlevel.spawn_system_task(self._close_those_at_rest)
        self._groups.end(group.unwrap())

    async def _close_those_at_rest(self) -> None:
        """Closes packs without appends. Ends when no pack is open.

        Each round marks all packs as resting. `_pack_of` clears the mark at the next append. A pack
        that is still marked in the next round is closed.
        """
        while self._packs:
            await trio.sleep(REST_S)
            if self._groups.is_busy:  # The packs belong to the thread now.
                continue
            for prefix, pack in list(self._packs.items()):
                if pack.is_resting:
                    self._close(prefix)
                pack.is_resting = True
        self._is_watching = False

    def _close_released(self) -> None:
        released, self._released = self._released, set()
        for prefix in [pack for pack in self._packs if _is_under(pack, released)]:
            self._close(prefix)

    def _write_group(self) -> list[_Waiter]:
        self._executor.linger(_LINGER_S)
        group = self._groups.take()
        by_prefix: dict[str, list[_Waiter]] = {}
        for waiter in group:
            if waiter.task is not None:
                by_prefix.setdefault(waiter.write.prefix, []).append(waiter)
        for prefix, waiters in by_prefix.items():
            bodies = [waiter.write.parts for waiter in waiters]
            written = outcome.capture(self._write, prefix, bodies)
            if isinstance(written, outcome.Error):
                # The length of the file is now unknown, so the offsets of later bodies would be
                # wrong. The next body of the prefix starts a new pack.
                self._close(prefix)
                for waiter in waiters:
                    # An outcome can be unwrapped only once, so each caller gets its own.
                    waiter.result = outcome.Error(written.error)
            else:
                for waiter, stored in zip(waiters, written.unwrap(), strict=True):
                    waiter.result = outcome.Value(stored)
        return group

    def _write(self, prefix: str, bodies: Sequence[Sequence[bytes]]) -> list[Stored]:
        # Before the first byte, so that a refused group uses none of the space that is left.
        self._check_room(sum(len(part) for parts in bodies for part in parts))
        pack = self._pack_of(prefix)
        offset = pack.size_bytes
        stored: list[Stored] = []
        for parts in bodies:
            digest, size_bytes = hashlib.sha256(), 0
            for part in parts:
                digest.update(part)
                size_bytes += len(part)
            key = Part(prefix, pack.name, offset, size_bytes).key
            stored.append(Stored(key, size_bytes, digest.hexdigest()))
            offset += size_bytes
        _append(pack.descriptor, [part for parts in bodies for part in parts if part])
        # Sync before the results: a caller stores the key in a row as soon as it has the key.
        os.fdatasync(pack.descriptor)
        if not os.fstat(pack.descriptor).st_nlink:
            # Another process deleted the prefix. The bytes disappear when this descriptor closes,
            # so the bodies are not stored.
            raise FileNotFoundError(errno.ENOENT, "the pack was removed", pack.name)
        # Only now: after an error the pack is closed, and no later body may use this offset.
        pack.size_bytes = offset
        return stored

    def _pack_of(self, prefix: str) -> _PackFile:
        pack = self._packs.get(prefix)
        if pack is not None and pack.size_bytes < PACK_BYTES_MAX:
            pack.is_resting = False
            self._packs.move_to_end(prefix)
            return pack
        self._close(prefix)
        while len(self._packs) >= _OPEN_MAX:
            self._close(next(iter(self._packs)))
        self._packs[prefix] = pack = self._new_pack(prefix)
        return pack

    def _new_pack(self, prefix: str) -> _PackFile:
        directory = f"{self._root}/{prefix}"
        self._make_directory(directory)
        name = f"{self._random.getrandbits(64):016x}"
        descriptor = os.open(_path(self._root, prefix, name), _NEW_FILE, 0o600)
        # The name of the file becomes durable here, once. Later groups sync only the data.
        sync_directory(directory)
        return _PackFile(name, descriptor)

    def _close(self, prefix: str) -> None:
        pack = self._packs.pop(prefix, None)
        if pack is not None:
            os.close(pack.descriptor)


def packed_place(root: str, key: str) -> Place | None:
    """Returns the place of the body with this key under `root`; None if it is not packed."""
    part = part_of(key)
    if part is None:
        return None
    return Place(_path(root, part.prefix, part.name), part.offset, part.size_bytes)


def _is_under(prefix: str, tops: Collection[str]) -> bool:
    # With the slash, because `a/bc` is not under `a/b`.
    return any(prefix == top or prefix.startswith(f"{top}/") for top in tops)


def _path(root: str, prefix: str, name: str) -> str:
    # The comma keeps files and directories apart: no segment of a key contains one, so no key
    # needs a directory of this name.
    return f"{root}/{prefix}/{MARK},{name}"


def _append(descriptor: int, parts: list[bytes]) -> None:
    """Writes all parts. The system may accept fewer bytes than it was given."""
    done = 0
    while done < len(parts):
        count = os.writev(descriptor, parts[done : done + _PARTS_MAX])
        while done < len(parts) and count >= len(parts[done]):
            count -= len(parts[done])
            done += 1
        if count:
            parts[done] = parts[done][count:]
