"""S3Blobs: stores bodies in objects of one bucket (docs/storage.md, S3 objects).

Small bodies that a run adds in large numbers share objects (packs.py). Any other body is an object.

S3 shows an object whole or not at all, and a GET continues with the object that it began with. A
caller can upload a list again while its URL is valid. So the service copies the list to a key that
callers cannot write, and uses the copy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from conveyor.domain.ids import Random
from conveyor.engines.aws.client.client import ATTEMPTS_MAX, Answer, AwsClient, Params, backoff_s
from conveyor.engines.aws.errors import AwsError, is_denial, raise_translated
from conveyor.engines.aws.packs import DEFAULT_PACKING, PACKED_BYTES_MAX, Packing, Packs
from conveyor.engines.aws_signature import PRESIGN_S_MAX
from conveyor.engines.packed_key import part_of, refuse_packed
from conveyor.ports.blobs import Stored
from conveyor.ports.clock import Clock
from conveyor.ports.errors import BlobMissing, BlobTooLarge, StorageDamaged, Unavailable

# S3 allows 10,000 parts. Every 1,000 parts the part size grows by 8 MiB, so an upload may have
# 430 GiB, and the last parts take 80 MiB of memory. Larger parts would take that memory at once.
PART_BYTES = 8 * 1024 * 1024
PARTS_OF_A_SIZE = 1000
# How long a failed upload may delay its caller to abort. The lifecycle aborts the rest.
ABORT_S = 5.0
# How often a copy is repeated because another process replaced it.
COPIES_MAX = 3

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*\Z")
_KEY_CHARS_MAX = 1024


class Presigner(Protocol):
    async def presign(self, operation: str, params: Params, *, expires_s: int) -> str: ...


@dataclass(slots=True)
class _Digest:
    """The length and the SHA-256 of the pieces so far."""

    size_bytes: int = 0
    _sha256: Any = field(default_factory=hashlib.sha256)

    def take(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        self._sha256.update(piece)

    def stored_as(self, key: str) -> Stored:
        return Stored(key, self.size_bytes, self._sha256.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Blobs:
    client: AwsClient
    presigner: Presigner
    clock: Clock
    random: Random
    bucket: str
    packing: Packing = DEFAULT_PACKING
    _packs: Packs = field(init=False)

    def __post_init__(self) -> None:
        packs = Packs(self._put_pack, self.random, self.packing)
        object.__setattr__(self, "_packs", packs)

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        refuse_packed(key)
        body = b"".join(parts)
        await self._call("PutObject", {**self._at(key), "Body": body})
        return Stored(key, len(body), hashlib.sha256(body).hexdigest())

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        refuse_packed(key)
        return await self.put_object(key, pieces)

    async def put_object(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        """Stores a whole object, which may be a pack."""
        at, digest = self._at(key), _Digest()
        async with aclosing(_parts(pieces, digest)) as parts:
            first = await anext(parts, b"")
            # A short body needs one request; a multipart upload needs at least three.
            if len(first) < PART_BYTES:
                await self._call("PutObject", {**at, "Body": first})
            else:
                await self._put_parts(at, first, parts)
        return digest.stored_as(key)

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        """Copies an object, and reads the copy once to compute its digest.

        A digest that a caller stated with the upload is not trusted.
        """
        refuse_packed(to)
        source, at = self._at(key), self._at(to)
        if bytes_max is not None:
            head = await self._call("HeadObject", source)
            if head["ContentLength"] > bytes_max:
                raise BlobTooLarge(key)
        for _ in range(COPIES_MAX):
            answer = await self._call("CopyObject", {**at, "CopySource": source})
            digest = _Digest()
            # IfMatch: the digest must be that of this copy, not of one that replaced it.
            try:
                await self._read(
                    {**at, "IfMatch": answer["CopyObjectResult"]["ETag"]}, digest, bytes_max
                )
            except BlobTooLarge:
                # The caller replaced the source between HeadObject and CopyObject.
                await self._call("DeleteObject", at)
                raise
            except (BlobMissing, AwsError) as error:
                if isinstance(error, AwsError) and error.code != "PreconditionFailed":
                    raise
                continue  # Another process copied to the same key meanwhile.
            return digest.stored_as(to)
        raise Unavailable("s3.CopyObject: the copy was replaced again and again")

    async def upload_url(self, key: str, *, content_type: str, expires_at: float) -> str | None:
        """Returns a URL for a PUT with this content type and a Content-Length.

        S3 refuses a chunked body. The length is not signed, because it is not known yet.
        """
        params = {**self._at(key), "ContentType": content_type}
        return await self._presign("PutObject", params, expires_at)

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str | None:
        """Returns None for a part of a pack: a URL cannot contain the range of bytes to send."""
        if part_of(key) is not None:
            return None
        params = {
            **self._at(key),
            "ResponseContentType": content_type,
            "ResponseContentDisposition": f'attachment; filename="{filename}"',
        }
        return await self._presign("GetObject", params, expires_at)

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        _check(f"{prefix}/{name}")
        size_bytes = sum(map(len, parts))
        # S3 has no range of 0 bytes, so an empty body is an object.
        if not self.packing.wait_s or not 0 < size_bytes <= PACKED_BYTES_MAX:
            return await self.put(f"{prefix}/{name}", parts)
        return await self._packs.add(prefix, b"".join(parts))

    def check_room(self) -> None:
        """Does nothing: a bucket has no limit that could be checked."""

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        part = part_of(key)
        if part is None:
            pieces = self._open(key, f"bytes={start}-" if start else None)
        elif start >= part.size_bytes:
            return
        else:
            first, end = part.offset + start, part.offset + part.size_bytes
            pieces = self._open(part.pack_key, f"bytes={first}-{end - 1}")
        left = 0 if part is None else part.size_bytes - start
        async with aclosing(pieces):
            async for piece in pieces:
                left -= len(piece)
                yield piece
        if part is not None and left:
            raise StorageDamaged(f"{key} has {left} bytes too few")

    async def _open(self, key: str, byte_range: str | None) -> AsyncGenerator[bytes, None]:
        params = self._at(key)
        if byte_range is not None:
            params["Range"] = byte_range
        try:
            async with (
                self.client.open("s3", "GetObject", params) as answer,
                aclosing(answer["Body"]) as body,
            ):
                async for piece in body:
                    yield piece
        except AwsError as error:
            # InvalidRange: the range begins at or behind the end, so there is nothing to read.
            if error.code != "InvalidRange":
                raise

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        _check(prefix)
        # With the slash, because `a/bc` is not under `a/b`.
        params = {"Bucket": self.bucket, "Prefix": f"{prefix}/"}
        gone = 0
        while True:
            page = await self._call("ListObjectsV2", params)
            keys = [entry["Key"] for entry in page.get("Contents", ())]
            if keys:
                await self._delete(keys)
                gone += len(keys)
            if not page["IsTruncated"] or (limit is not None and gone >= limit):
                return gone
            params["ContinuationToken"] = page["NextContinuationToken"]

    async def _put_parts(self, at: Params, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        upload = {**at, "UploadId": (await self._call("CreateMultipartUpload", at))["UploadId"]}
        async with AsyncExitStack() as undo:
            # S3 bills the parts of an unfinished upload until it is aborted.
            undo.push_async_callback(self._abort, upload)
            done = [await self._put_part(upload, 1, first)]
            async for part in rest:
                done.append(await self._put_part(upload, len(done) + 1, part))
            parts = {"MultipartUpload": {"Parts": done}}
            await self._call("CompleteMultipartUpload", {**upload, **parts})
            undo.pop_all()

    async def _put_part(self, upload: Params, number: int, part: bytes) -> dict[str, Any]:
        params = {**upload, "PartNumber": number, "Body": part}
        return {"PartNumber": number, "ETag": (await self._call("UploadPart", params))["ETag"]}

    async def _abort(self, upload: Params) -> None:
        """Aborts an upload. If that fails, the bucket's lifecycle does it in a day."""
        # Shielded, because the usual reason for an abort is a cancelled caller. Bounded, because a
        # shutdown must not wait for S3.
        with trio.move_on_after(ABORT_S, shield=True), suppress(AwsError, Unavailable):
            await self._call("AbortMultipartUpload", upload)

    async def _read(self, params: Params, digest: _Digest, bytes_max: int | None) -> None:
        async with (
            self.client.open("s3", "GetObject", params) as answer,
            aclosing(answer["Body"]) as body,
        ):
            async for piece in body:
                digest.take(piece)
                if bytes_max is not None and digest.size_bytes > bytes_max:
                    raise BlobTooLarge(params["Key"])

    async def _put_pack(self, key: str, body: bytes) -> None:
        await self._call("PutObject", {**self._at(key), "Body": body})

    async def _delete(self, keys: Sequence[str]) -> None:
        """Deletes objects. A successful answer lists the keys that S3 could not delete."""
        code = ""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            objects = [{"Key": key} for key in keys]
            params = {"Bucket": self.bucket, "Delete": {"Objects": objects, "Quiet": True}}
            errors = (await self._call("DeleteObjects", params)).get("Errors", ())
            if not errors:
                return
            keys, code = [error["Key"] for error in errors], errors[0]["Code"]
            if is_denial(code):
                refusal = AwsError(code, errors[0].get("Message", ""), status=403)
                raise_translated(refusal, "s3.DeleteObjects")
            await trio.sleep(backoff_s(attempt, self.random))
        raise Unavailable(f"s3.DeleteObjects: {len(keys)} objects could not be removed: {code}")

    async def _presign(self, operation: str, params: Params, expires_at: float) -> str:
        left_s = int(expires_at - self.clock.now())
        expires_s = min(max(1, left_s), PRESIGN_S_MAX)
        return await self.presigner.presign(operation, params, expires_s=expires_s)

    async def _call(self, operation: str, params: Params) -> Answer:
        return await self.client.call("s3", operation, params)

    def _at(self, key: str) -> dict[str, Any]:
        _check(key)
        return {"Bucket": self.bucket, "Key": key}


async def _parts(pieces: AsyncIterable[bytes], digest: _Digest) -> AsyncGenerator[bytes, None]:
    """Joins pieces to parts of the size that S3 requires. Only the last part may be shorter."""
    number, buffer = 0, bytearray()
    async for piece in pieces:
        digest.take(piece)
        buffer += piece
        while len(buffer) >= (size := _part_bytes(number)):
            yield bytes(buffer[:size])
            del buffer[:size]
            number += 1
    if buffer:
        yield bytes(buffer)


def _part_bytes(number: int) -> int:
    return PART_BYTES * (1 + number // PARTS_OF_A_SIZE)


def _check(key: str) -> None:
    if not _KEY.match(key) or len(key) > _KEY_CHARS_MAX:
        raise ValueError(f"not a blob key: {key!r}")


# Creation of the bucket, which may be repeated (docs/storage.md, S3 objects).
#
# The bucket's lifecycle removes what the service itself failed to remove: interrupted uploads,
# uploaded lists that the sweeper missed, old versions in a versioned bucket, and bodies that have
# reached the maximum age. A lifecycle rule selects objects by prefix only. So everything under
# `jobs/` expires by age, and lists, which live as long as their job, are under another prefix.


# In days after the start of the upload, the creation of the list, and the removal of the object.
ABANDONED_DAYS = 1
INPUT_DAYS = 30
OLD_VERSION_DAYS = 1

_OURS = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})
_NOT_OFFERED = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported"})
_NONE_YET = "NoSuchLifecycleConfiguration"
_HOME = "us-east-1"  # S3 refuses a LocationConstraint for this region.
_JOBS = "jobs/"
_OLD_BODIES = "old-bodies"

Rule = dict[str, Any]

PRIVATE = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}


def lifecycle(body_days: int) -> list[Rule]:
    return [
        _rule(
            "abandoned-uploads",
            "",
            AbortIncompleteMultipartUpload={"DaysAfterInitiation": ABANDONED_DAYS},
        ),
        _rule("forgotten-inputs", "inputs/", Expiration={"Days": INPUT_DAYS}),
        _rule(_OLD_BODIES, _JOBS, Expiration={"Days": body_days}),
        _rule("old-versions", "", NoncurrentVersionExpiration={"NoncurrentDays": OLD_VERSION_DAYS}),
    ]


def _rule(name: str, prefix: str, **action: dict[str, int]) -> Rule:
    return {"ID": name, "Status": "Enabled", "Filter": {"Prefix": prefix}, **action}


async def make_bucket(client: AwsClient, bucket: str, *, region: str, body_days: int) -> list[str]:
    """Creates the bucket, closes it to the public, and sets its lifecycle.

    `client` needs BotoTransport, because HttpTransport lacks these operations. Returns the settings
    that were left out, with the reason. Raises NotAllowed if the bucket belongs to another account.
    """
    params: dict[str, Any] = {"Bucket": bucket}
    if region != _HOME:
        params["CreateBucketConfiguration"] = {"LocationConstraint": region}
    try:
        await client.call("s3", "CreateBucket", params)
    except AwsError as error:
        if error.code not in _OURS:
            raise
        # The bucket exists. HeadBucket fails if it belongs to another account.
        await client.call("s3", "HeadBucket", {"Bucket": bucket})
    # Rules that are not ours are kept: setting a lifecycle replaces all rules.
    there, left_out = await _rules_of(client, bucket), []
    ours = {rule["ID"]: rule for rule in lifecycle(body_days)}
    others = [rule for rule in there if rule.get("ID") not in ours]
    is_swept = any(rule.get("ID") == _OLD_BODIES for rule in there)
    if not is_swept and await _has_old_lists(client, bucket):
        del ours[_OLD_BODIES]
        left_out = [f"bodies do not go by age: lists of an earlier release are under {_JOBS}"]
    rules = [*others, *ours.values()]
    configured: dict[str, dict[str, Any]] = {
        "PutPublicAccessBlock": {"PublicAccessBlockConfiguration": PRIVATE},
        "PutBucketLifecycleConfiguration": {"LifecycleConfiguration": {"Rules": rules}},
    }
    return left_out + [
        f"not offered here: {operation}"
        for operation, params in configured.items()
        if not await _is_offered(client, operation, {"Bucket": bucket, **params})
    ]


async def _rules_of(client: AwsClient, bucket: str) -> list[Rule]:
    try:
        there = await client.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})
    except AwsError as error:
        if error.code != _NONE_YET and not _is_not_offered(error):
            raise
        return []
    return list(there.get("Rules", ()))


async def _has_old_lists(client: AwsClient, bucket: str) -> bool:
    """Returns whether lists are under the prefix of bodies, as in earlier releases.

    Such lists must not expire by age. The search makes one call per job and skips its bodies: in
    the order of keys the lists of a job come last.
    """
    params, after = {"Bucket": bucket, "Prefix": _JOBS, "MaxKeys": 1}, _JOBS
    while True:
        page = await client.call("s3", "ListObjectsV2", {**params, "StartAfter": after})
        if not page.get("Contents"):
            return False
        key = page["Contents"][0]["Key"]
        job, _, rest = key.removeprefix(_JOBS).partition("/")
        if rest.startswith("sources/"):
            return True
        after = max(key, f"{_JOBS}{job}/sources/")


def _is_not_offered(error: AwsError) -> bool:
    return error.code in _NOT_OFFERED or error.status == 501


async def _is_offered(client: AwsClient, operation: str, params: dict[str, Any]) -> bool:
    try:
        await client.call("s3", operation, params)
    except AwsError as error:
        if not _is_not_offered(error):
            raise
        return False
    return True
