"""The folder of a scrape: its lock, its list and options, and results.jsonl.

The state is in `FOLDER/.conveyor`, or in --data-dir. Files there are written under another name
and renamed, so each one is whole or absent. results.jsonl is appended to while pages arrive; a kill
can cut its last line, which the next start drops. At the end it is written anew in list order.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shlex
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from conveyor.cli.scrape.options import FixedOption, ScrapeOptions
from conveyor.cli.scrape.pages import Page, PageStatus, ResultLine
from conveyor.domain.errors import ConveyorError

LIST_NAME = "results.jsonl"
STATE_NAME = ".conveyor"
FORMAT_VERSION = 1
# A process that was killed, or its helpers, may hold the lock for a moment longer.
LOCK_S = 2.0
_READ_BYTES = 1024 * 1024


class CannotWrite(ConveyorError):
    """The folder for the pages cannot be created or written."""


class FolderInUse(ConveyorError):
    """Another process scrapes into this folder."""


class FolderRefused(ConveyorError):
    """The folder belongs to another list. The message names what can be done."""


class FolderState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a folder remembers of its list, beside the list itself.

    `lists` has the fingerprints of all lists that it was given. `boot_id` names the start of the
    machine during which its pages were written.
    """

    version: int
    folder: str
    source: str
    lists: list[str]
    options: ScrapeOptions
    boot_id: str = ""
    spent_max: int = 0


def cannot_write(folder: Path, error: OSError) -> CannotWrite:
    hint = " The same command goes on once there is room." if error.errno == errno.ENOSPC else ""
    return CannotWrite(f"Cannot write to {folder}: {error.strerror}.{hint}")


class Folder:
    """Owned by one process at a time; `open` takes the lock, `close` releases it."""

    def __init__(self, path: Path, data_dir: Path | None = None) -> None:
        self.path = path
        self.data_dir = data_dir or path / STATE_NAME
        self.scratch = path / STATE_NAME / "part"
        self.state: FolderState | None = None
        self.pages: list[Page] = []
        self._lock: int | None = None
        self._results: int | None = None
        self._size_bytes = 0
        # Where the latest line of each page is; a length of 0 means that there is none.
        self._offsets = array("Q")
        self._lengths = array("L")

    # The lock.

    def open(self, *, drops_state: bool = False) -> None:
        """`drops_state`: the folder gets a new list, so a state that cannot be read is none."""
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            self.data_dir.mkdir(parents=True, exist_ok=True)
            # Headers and cookies of the list are remembered here.
            with suppress(PermissionError):  # FAT has no permissions.
                self.data_dir.chmod(0o700)
            self._lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        give_up_at = time.monotonic() + LOCK_S
        while not self._has_locked():
            if time.monotonic() > give_up_at:
                owner = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
                raise FolderInUse(
                    f"{self.path} is in use by another scrape, process {owner}. "
                    f"`conveyor ps {shlex.quote(str(self.path))}` shows it; "
                    "-o chooses another folder."
                )
            time.sleep(0.02)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        for left in self.scratch.iterdir():
            left.unlink()
        self.state = self._load_state(drops_state=drops_state)

    def _has_locked(self) -> bool:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return True

    def close(self) -> None:
        for descriptor in (self._results, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._results = self._lock = None

    # The list and the options.

    def _load_state(self, *, drops_state: bool) -> FolderState | None:
        try:
            content = (self.data_dir / "scrape.json").read_bytes()
        except FileNotFoundError:
            return None
        try:
            state = msgspec.json.decode(content, type=FolderState)
        except msgspec.DecodeError as error:
            if drops_state:
                return None
            raise FolderRefused(
                f"{self.data_dir}/scrape.json cannot be read ({error}). "
                "Start over with the list and --restart, or give another folder with -o."
            ) from None
        if state.version > FORMAT_VERSION:
            raise FolderRefused(f"{self.path} was written by a later release of Conveyor.")
        if state.folder != str(self.path.resolve()) and self.data_dir != self.path / STATE_NAME:
            raise FolderRefused(f"{self.data_dir} has the state of {state.folder}.")
        return state

    def load_pages(self) -> list[Page]:
        """Returns the list that the folder remembers."""
        content = (self.data_dir / "list.jsonl").read_bytes()
        return msgspec.json.Decoder(Page).decode_lines(content)

    def begin(self, pages: Sequence[Page], state: FolderState) -> None:
        """Remembers the list, then the state that refers to it."""
        self.pages = list(pages)
        lines = msgspec.json.Encoder().encode_lines(self.pages)
        self._replace(self.data_dir / "list.jsonl", [lines])
        self.save_state(state)

    def save_state(self, state: FolderState) -> None:
        self.state = state
        self._replace(self.data_dir / "scrape.json", [msgspec.json.encode(state)])

    def clear(self, *, keeps_list: bool) -> None:
        """Removes the pages of an earlier list, and its state unless the list stays; nothing
        else."""
        for line in self._lines():
            if line.file is not None and _is_inside(line.file):
                (self.path / line.file).unlink(missing_ok=True)
        if keeps_list:
            assert self.state is not None
            self.save_state(msgspec.structs.replace(self.state, spent_max=0))
        else:
            (self.data_dir / "scrape.json").unlink(missing_ok=True)
            self.state = None
        (self.path / LIST_NAME).unlink(missing_ok=True)

    # The results.

    def open_results(self, *, checks_digests: bool) -> Iterator[ResultLine]:
        """Reads the lines of earlier commands and opens the file for more.

        Yields the latest line of each page. A line whose page is not there as it says does not
        count.
        """
        count = len(self.pages)
        self._offsets, self._lengths = array("Q", bytes(8 * count)), array("L", [0]) * count
        latest: dict[int, ResultLine] = {}
        places: dict[int, tuple[int, int]] = {}
        position = 0
        for line, length in self._sized_lines():
            if line is not None and 0 <= line.index < count:
                latest[line.index] = line
                places[line.index] = (position, length)
            position += length
        descriptor = os.open(self.path / LIST_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, position)
        os.lseek(descriptor, position, os.SEEK_SET)
        self._results, self._size_bytes = descriptor, position
        for index, line in latest.items():
            if self._has_page(line, checks_digest=checks_digests):
                self._offsets[index], self._lengths[index] = places[index]
                yield line

    def _has_page(self, line: ResultLine, *, checks_digest: bool) -> bool:
        if line.status != PageStatus.SUCCESSFUL:
            return True
        if line.file is None or not _is_inside(line.file):
            return False
        path = os.path.join(self.path, line.file)
        try:
            size = os.stat(path).st_size
            if line.offset is not None:
                length = line.length or 0
                if size < line.offset + length:
                    return False
                return not checks_digest or _has_record(path, line.offset, length, line.sha256)
            if size != line.bytes:
                return False
            return not checks_digest or _sha256_of(path) == line.sha256
        except OSError:
            return False

    def append(self, lines: Sequence[ResultLine]) -> None:
        """Appends lines whose pages are written."""
        assert self._results is not None
        encoded = [_encode(line) + b"\n" for line in lines]
        try:
            _write_all(self._results, b"".join(encoded))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        for line, text in zip(lines, encoded, strict=True):
            self._offsets[line.index] = self._size_bytes
            self._lengths[line.index] = len(text)
            self._size_bytes += len(text)

    def lines_of(self, matches: Callable[[ResultLine], bool], limit: int) -> list[ResultLine]:
        """Returns the first lines in list order that are wanted."""
        result_lines: list[ResultLine] = []
        for text in self._ordered():
            line = _decode(text)
            if matches(line):
                result_lines.append(line)
                if len(result_lines) == limit:
                    break
        return result_lines

    def finish(self) -> None:
        """Writes results.jsonl anew: one line for each page, in list order."""
        self._replace(self.path / LIST_NAME, self._ordered())

    def _ordered(self) -> Iterator[bytes]:
        if not self._size_bytes:
            return
        assert self._results is not None
        with mmap.mmap(self._results, self._size_bytes, access=mmap.ACCESS_READ) as content:
            for offset, length in zip(self._offsets, self._lengths, strict=True):
                if length:
                    yield content[offset : offset + length]

    def _lines(self) -> Iterator[ResultLine]:
        return (line for line, _ in self._sized_lines() if line is not None)

    def _sized_lines(self) -> Iterator[tuple[ResultLine | None, int]]:
        """Yields the whole lines with their lengths; None for one that cannot be read."""
        try:
            file = (self.path / LIST_NAME).open("rb", buffering=_READ_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            raise cannot_write(self.path, error) from error
        with file:
            for text in file:
                if not text.endswith(b"\n"):
                    return  # Cut off by a kill.
                try:
                    yield _decode(text), len(text)
                except msgspec.DecodeError:
                    yield None, len(text)

    def _replace(self, path: Path, pieces: Iterable[bytes]) -> None:
        # On the same file system as `path`, so that the rename is atomic.
        near = self.scratch if path.parent == self.path else self.data_dir
        scratch = near / f"{path.name}.part"
        try:
            with scratch.open("wb", buffering=_READ_BYTES) as file:
                with suppress(PermissionError):
                    os.fchmod(file.fileno(), 0o644 if path.name == LIST_NAME else 0o600)
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except OSError as error:
            raise cannot_write(self.path, error) from error


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ResultLine).decode


def _is_inside(name: str) -> bool:
    """Whether a name from results.jsonl stays within the folder."""
    return not name.startswith("/") and ".." not in name.split("/")


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sha256_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Body(msgspec.Struct):
    body: str | None = None
    body_base64: bytes = b""


def _has_record(path: str, offset: int, length: int, digest: str | None) -> bool:
    """Whether the record of pages.jsonl or pages.warc.gz is whole and has the page."""
    with open(path, "rb") as file:
        record = os.pread(file.fileno(), length, offset)
    try:
        body = _body_in(record)
    except (ValueError, zlib.error, msgspec.DecodeError):
        return False
    return hashlib.sha256(body).hexdigest() == digest


def _body_in(record: bytes) -> bytes:
    if not record.startswith(b"\x1f\x8b"):
        body = msgspec.json.decode(record, type=_Body)
        return body.body_base64 if body.body is None else body.body.encode()
    # The head of the record, that of the answer, and the body with an empty line.
    _, _, rest = zlib.decompress(record, 31).split(b"\r\n\r\n", 2)
    return rest[:-4]


def boot_id() -> str:
    """Returns the name of this start of the machine; empty where there is none.

    A kill loses nothing that was written, but a power cut can. So digests are checked only if the
    machine was started anew.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def changed_fixed_options(old: ScrapeOptions, new: ScrapeOptions) -> list[FixedOption]:
    """Returns the options that cannot change while the folder has pages."""
    return [option for option in FixedOption if getattr(old, option) != getattr(new, option)]
