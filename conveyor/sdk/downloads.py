"""Saves bodies as files, complete or not at all, and checks them against the digest of the server.

The connection streams a single body. Many bodies go through the HTTP pool, several at a time:
`Bodies` is for programs on Trio, `save_all` for other programs. `verify_export` checks a saved
export of any format against its manifest: every body and every count.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import random
import re
import secrets
import ssl
import struct
import zipfile
import zlib
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Protocol, TypeVar
from urllib.parse import urlencode
from urllib.request import getproxies, proxy_bypass

import httpx
import msgspec
import trio

from actors.runtime.child import unwrapping_group
from conveyor.domain.export.entry import LISTING, MANIFEST, Line
from conveyor.domain.export.formats import TASK_FIELD, LastLine
from conveyor.domain.export.parquet import MANIFEST_KEY, is_available
from conveyor.domain.export_record import ExportFormat, Manifest, ManifestDigest
from conveyor.domain.submit.target import BadUrl, Target, TargetPolicy, join, parse_url
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.exchange import Headers, Request, Response
from conveyor.http_client.pool import HttpPool
from conveyor.sdk.errors import ApiError, RetryPolicy, SdkError, Unreachable, error_from
from conveyor.sdk.operations import Call

# Bodies in transfer at the same time. Each one is held in memory.
AT_ONCE = 16
DEADLINE_S = 600.0
# The API redirects once, to the storage. More hops are allowed, but no loop.
REDIRECTS_MAX = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# No encoding: the digest of the server is that of the stored bytes.
_HEADERS = (("Accept-Encoding", "identity"), ("User-Agent", "conveyor-sdk"))
T = TypeVar("T")

_SHA256_TAG = re.compile(r'"([0-9a-f]{64})"\Z')


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A body that was saved as a file."""

    size_bytes: int
    sha256: str
    content_type: str


class Damaged(Exception):
    """The received body does not match the digest of the server."""


class Download:
    """Writes and hashes the pieces of one body while they arrive."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def take(self, piece: bytes) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self._size_bytes += len(piece)

    def finish(self, headers: Mapping[str, str]) -> Downloaded:
        """Returns the saved body. Raises Damaged if the digest of the server differs."""
        sha256 = self._digest.hexdigest()
        tag = _SHA256_TAG.match(headers.get("etag", ""))
        if tag is not None and tag[1] != sha256:
            raise Damaged("the body was damaged on its way")
        return Downloaded(self._size_bytes, sha256, headers.get("content-type", ""))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a temporary file that replaces `path` at the end of the block. After an error it is
    deleted.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with scratch.open("xb") as file:
            yield file
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


async def retrying(retry: RetryPolicy, once: Callable[[], Awaitable[T]]) -> T:
    """Calls `once` and repeats it according to the policy."""
    for attempt in count(1):
        try:
            return await once()
        except SdkError as error:
            luck = random.random()  # noqa: S311 (it spreads load, it keeps no secret)
            pause_s = retry.pause_s(error, attempt=attempt, luck=luck)
            if pause_s is None:
                raise
        await trio.sleep(pause_s)
    raise AssertionError("a policy gives up in the end")


class Pool(Protocol):
    """What Bodies needs of a pool."""

    async def fetch(self, request: Request) -> Response: ...


class Bodies:
    """Downloads bodies of one server for one caller. The owner of the pool closes it."""

    def __init__(self, pool: Pool, base_url: str, api_key: str, retry: RetryPolicy) -> None:
        self._pool = pool
        self._base_url = base_url
        self._api_key = api_key
        self._retry = retry

    async def save_all(
        self, files: Mapping[str, tuple[Call[None], Path]]
    ) -> dict[str, Downloaded | ApiError]:
        """Saves every body as a file, or returns its ApiError. Raises Unreachable."""
        saved: dict[str, Downloaded | ApiError] = {}
        failures: list[SdkError | OSError] = []
        rest = iter(files.items())

        async def work() -> None:
            try:
                for name, (call, path) in rest:
                    saved[name] = await self._save_or_error(call, path)
            except (SdkError, OSError) as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        with unwrapping_group():
            async with trio.open_nursery() as nursery:
                for _ in range(min(AT_ONCE, len(files))):
                    nursery.start_soon(work)
        if failures:
            raise failures[0]
        return saved

    async def _save_or_error(self, call: Call[None], path: Path) -> Downloaded | ApiError:
        try:
            return await self.save(call, path)
        except ApiError as error:
            return error

    async def save(self, call: Call[None], path: Path) -> Downloaded:
        """Saves the body as a file, completely or not at all. Raises ApiError and Unreachable."""
        return await retrying(self._retry, lambda: self._save(call, path))

    async def _save(self, call: Call[None], path: Path) -> Downloaded:
        response = await self._fetch(call)
        try:
            with replacing(path) as file:
                download = Download(file)
                download.take(response.body)
                return download.finish(headers_of(response))
        except Damaged as error:
            raise Unreachable(self._base_url, str(error)) from error

    async def load(self, call: Call[None]) -> bytes:
        """Returns the body in memory, without retries. Raises ApiError and Unreachable."""
        return (await self._fetch(call)).body

    async def _fetch(self, call: Call[None]) -> Response:
        try:
            url = f"{self._base_url}{call.path}?{urlencode(call.query)}"
            response = await self._follow(url)
        except FetchFailed as error:
            raise Unreachable(self._base_url, str(error)) from error
        if not 200 <= response.status < 300:
            raise error_from(response.status, headers_of(response), response.body)
        return response

    async def _follow(self, url: str) -> Response:
        """Follows redirects, without the API key: only the Conveyor server may get the key."""
        target = self._check(parse_url(url))
        response = await self._get(target, (*_HEADERS, ("X-API-Key", self._api_key)))
        for _ in range(REDIRECTS_MAX):
            location = response.header(b"location")
            if response.status not in _REDIRECTS or location is None:
                break
            target = self._check(join(target, location))
            response = await self._get(target, _HEADERS)
        return response

    async def _get(self, target: Target, headers: Headers) -> Response:
        return await self._pool.fetch(
            Request(method="GET", target=target, headers=headers, deadline_s=DEADLINE_S)
        )

    def _check(self, target: Target | BadUrl) -> Target:
        if isinstance(target, BadUrl):
            raise Unreachable(self._base_url, target.detail)
        return target


def save_all(
    base_url: str,
    api_key: str,
    files: Mapping[str, tuple[Call[None], Path]],
    *,
    timeout_s: float,
    retry: RetryPolicy,
) -> dict[str, Downloaded | ApiError]:
    """As `Bodies.save_all`, in a new Trio event loop. It must not be called inside one."""
    pool = make_pool(timeout_s)
    try:
        return trio.run(Bodies(pool, base_url, api_key, retry).save_all, files)
    finally:
        pool.close()


def make_pool(timeout_s: float) -> HttpPool:
    limits = PoolLimits(connect_timeout_s=timeout_s, read_timeout_s=timeout_s, trusts_peers=True)
    # The caller chose the server, and the server where it sends its callers.
    return HttpPool(TargetPolicy(allow_private=True), limits, tls=_tls())


def headers_of(response: Response) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}


@cache
def _tls() -> ssl.SSLContext:
    """Trusts the same authorities as the other calls. It is cached, because reading them takes a
    while."""
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def is_direct(base_url: str, *, trust_env: bool) -> bool:
    """Whether the pool can reach a server: it uses no proxy, and reads URLs strictly."""
    target = parse_url(base_url)
    if isinstance(target, BadUrl):
        return False
    is_proxied = trust_env and not {"http", "https", "all"}.isdisjoint(getproxies())
    return not is_proxied or bool(proxy_bypass(target.host))


_PIECE_BYTES = 65_536
# The errors that the readers raise for damaged files.
_DAMAGE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    ValueError,
    csv.Error,
    msgspec.MsgspecError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class BadExport(SdkError):
    """The file does not match its manifest, or is not an export."""


def manifest_path(path: Path) -> Path:
    """The path of the separate manifest, for formats that cannot contain one."""
    return path.with_name(f"{path.name}.{MANIFEST}")


def verify_export(path: Path) -> Manifest:
    """Returns the manifest of a valid file. Raises BadExport, or OSError if it is not readable."""
    with path.open("rb") as file:
        start = file.read(2)
    check = _CHECKS.get(start, _check_text)
    try:
        manifest, tally = check(path)
    except _DAMAGE as error:
        raise BadExport(f"{path} cannot be read as an export: {error}") from error
    if not tally.agrees_with(manifest):
        raise BadExport(f"{path} is not what its manifest says.")
    return manifest


_Checked = tuple[Manifest, ManifestDigest]


def _check_zip(path: Path) -> _Checked:
    tally = ManifestDigest()
    with zipfile.ZipFile(path) as archive:
        manifest = msgspec.json.decode(archive.read(MANIFEST), type=Manifest)
        decoder = msgspec.json.Decoder(Line)
        with archive.open(LISTING) as listing:
            for text in listing:
                line = decoder.decode(text)
                sha256 = None
                if line.file is not None:
                    with archive.open(line.file) as body:
                        sha256 = _sha256_of(body)
                tally.take(line.task_id, line.status, line.size_bytes, sha256)
        files = len(archive.infolist()) - 2
    if files != manifest.counts.get("successful", 0):
        raise ValueError(f"it holds {files} bodies")
    return manifest, tally


def _check_text(path: Path) -> _Checked:
    if path.suffix == f".{ExportFormat.CSV}" or manifest_path(path).exists():
        return _check_csv(path)
    return _check_jsonl(path)


def _check_jsonl(path: Path) -> _Checked:
    tally = ManifestDigest()
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        before = b""
        for text in file:
            if before:
                _take_line(tally, decoder.decode(before))
            before = text
    return msgspec.json.decode(before, type=LastLine).manifest, tally


def _take_line(tally: ManifestDigest, line: Line) -> None:
    body = b64decode(line.body_base64) if line.body_base64 is not None else None
    if line.body is not None:
        body = line.body.encode()
    sha256 = None if body is None else hashlib.sha256(body).hexdigest()
    tally.take(line.task_id, line.status, 0 if body is None else len(body), sha256)


def _check_csv(path: Path) -> _Checked:
    """Checks the rows of a CSV file, which contains no bodies."""
    manifest = msgspec.json.decode(manifest_path(path).read_bytes(), type=Manifest)
    tally = ManifestDigest()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, strict=True):
            size_bytes = int(row["size_bytes"])
            tally.take(row["task_id"], row["status"], size_bytes, row["sha256"] or None)
    return manifest, tally


def _check_warc(path: Path) -> _Checked:
    tally = ManifestDigest()
    block = b""
    with gzip.open(path) as file:
        for fields, block in _records(file):
            if TASK_FIELD in fields:
                task_id, _, status = fields[TASK_FIELD].partition(" ")
                is_page = fields["WARC-Type"] == "response"
                body = block.partition(b"\r\n\r\n")[2] if is_page else b""
                sha256 = hashlib.sha256(body).hexdigest() if is_page else None
                tally.take(task_id, status, len(body), sha256)
    return msgspec.json.decode(block, type=Manifest), tally


def _check_parquet(path: Path) -> _Checked:
    if not is_available():
        raise ValueError("reading it needs PyArrow: pip install 'conveyor[parquet]'")
    from pyarrow import parquet

    tally = ManifestDigest()
    with parquet.ParquetFile(path) as file:
        text = file.metadata.metadata[MANIFEST_KEY.encode()]
        manifest = msgspec.json.decode(text, type=Manifest)
        for rows in file.iter_batches(batch_size=64, columns=["task_id", "status", "body"]):
            for row in rows.to_pylist():
                body = row["body"]
                sha256 = None if body is None else hashlib.sha256(body).hexdigest()
                tally.take(row["task_id"], row["status"], len(body or b""), sha256)
    return manifest, tally


def _records(file: gzip.GzipFile) -> Iterator[tuple[dict[str, str], bytes]]:
    while version := file.readline():
        if version != b"WARC/1.1\r\n":
            raise ValueError("a record does not begin as one")
        fields: dict[str, str] = {}
        while (text := file.readline()) not in (b"\r\n", b""):
            name, _, value = text.decode().partition(": ")
            fields[name] = value.rstrip("\r\n")
        block = file.read(int(fields["Content-Length"]))
        if file.read(4) != b"\r\n\r\n":
            raise ValueError("a record does not end as one")
        yield fields, block


def _sha256_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


_CHECKS: dict[bytes, Callable[[Path], _Checked]] = {
    b"PK": _check_zip,
    b"\x1f\x8b": _check_warc,
    b"PA": _check_parquet,
}
