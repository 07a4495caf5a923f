"""The modelled S3: buckets of whole objects, multipart uploads, and presigned URLs
(docs/simulator.md, Models).

An object is an immutable byte string: a read that has begun continues with the bytes that it began
with.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.engines.aws_signature import escape_path
from conveyor.simulation.models.fault_source import FaultSource

URL = "https://s3.test/"
# The limits of S3 for a list, a bulk delete and the parts of an upload.
PAGE_KEYS_MAX = 1000
DELETED_MAX = 1000
PART_BYTES_MIN = 5 * 1024 * 1024
PARTS_MAX = 10_000

_KEPT = ("ContentType", "ContentEncoding", "CacheControl")
_PUTS = frozenset({"PutObject", "CopyObject", "CompleteMultipartUpload"})
_LAST = "\U0010ffff"

Params = Mapping[str, Any]
Answer = dict[str, Any]
Answered = tuple[int, dict[str, str], bytes]
"""Status, headers by lower-case name, and body."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object."""

    body: bytes
    etag: str
    modified_at: datetime
    kind: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(slots=True)
class Upload:
    """A multipart upload that is open."""

    bucket: str
    key: str
    params: Params
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class Bucket:
    """The objects of a bucket, listed in the order of their keys."""

    objects: dict[str, Stored] = field(default_factory=dict)
    _order: list[str] | None = None

    def put(self, key: str, stored: Stored) -> None:
        if key not in self.objects:
            self._order = None
        self.objects[key] = stored

    def remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._order = None

    def keys(self, prefix: str, after: str) -> Iterator[str]:
        if self._order is None:
            self._order = sorted(self.objects)
        order = self._order
        first = max(bisect_left(order, prefix), bisect_right(order, after))
        return iter(order[first : bisect_left(order, prefix + _LAST)])


@dataclass(frozen=True, slots=True)
class _Link:
    """What a presigned URL allows, and until when."""

    operation: str
    params: Params
    expires_at: float


@dataclass(slots=True)
class S3Model:
    """`uploads` are multipart uploads that were neither completed nor aborted."""

    fault_source: FaultSource
    now: Callable[[], float]
    buckets: dict[str, Bucket] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    _links: dict[str, _Link] = field(default_factory=dict)
    _number: int = 0
    _handlers: dict[str, Callable[[Params], Answer]] = field(init=False)

    def __post_init__(self) -> None:
        self._handlers = {
            "CreateBucket": self._create,
            "HeadBucket": self._head_bucket,
            "PutPublicAccessBlock": self._head_bucket,
            "GetBucketLifecycleConfiguration": self._head_bucket,
            "PutBucketLifecycleConfiguration": self._head_bucket,
            "PutObject": self._put,
            "GetObject": self._get,
            "HeadObject": self._head,
            "DeleteObject": self._delete,
            "DeleteObjects": self._delete_all,
            "ListObjectsV2": self._list,
            "CopyObject": self._copy,
            "CreateMultipartUpload": self._begin,
            "UploadPart": self._put_part,
            "CompleteMultipartUpload": self._complete,
            "AbortMultipartUpload": self._abort,
        }

    def run(self, operation: str, params: Params) -> Answer:
        """Applies one operation at this instant."""
        if operation not in self._handlers or "VersionId" in params:
            raise NotImplementedError(f"s3.{operation} with {sorted(params)}")
        faults = self.fault_source.service_rates.s3
        if self.fault_source.occurs("s3.slow_down", faults.slow_down_rate):
            raise AwsError("SlowDown", "Please reduce your request rate.", status=503)
        answer = self._handlers[operation](params)
        if operation in _PUTS and self.fault_source.occurs("s3.lost_put", faults.lost_put_rate):
            raise NoResponse("the connection closed", was_sent=True)
        return answer

    def presign(self, operation: str, params: Params, *, expires_s: int) -> str:
        """Returns a URL with which anybody may perform this operation until it expires."""
        secret = f"{self.fault_source.random.getrandbits(128):032x}"
        url = f"{URL}{params['Bucket']}/{escape_path(params['Key'])}?X-Amz-Signature={secret}"
        self._links[url] = _Link(operation, dict(params), self.now() + expires_s)
        return url

    def handle(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answered:
        """Answers a request to a presigned URL; header names are lower-case."""
        link = self._links.get(url)
        if link is None or method != {"PutObject": "PUT", "GetObject": "GET"}[link.operation]:
            return _refused(403, "SignatureDoesNotMatch")
        if self.now() >= link.expires_at:
            return _refused(403, "AccessDenied")
        params = dict(link.params)
        if link.operation == "PutObject":
            if "content-length" not in headers:
                return _refused(411, "MissingContentLength")
            if headers.get("content-type") != params.get("ContentType"):
                return _refused(403, "SignatureDoesNotMatch")
            params["Body"] = body
        elif "range" in headers:
            params["Range"] = headers["range"]
        try:
            answer = self.run(link.operation, params)
        except AwsError as error:
            return _refused(error.status, error.code)
        except NoResponse:
            return _refused(500, "InternalError")
        return _as_http(answer, link.params)

    def _create(self, params: Params) -> Answer:
        if params["Bucket"] in self.buckets:
            raise AwsError("BucketAlreadyOwnedByYou", "it is there", status=409)
        self.buckets[params["Bucket"]] = Bucket()
        return {"Location": f"/{params['Bucket']}"}

    def _head_bucket(self, params: Params) -> Answer:
        self._bucket(params["Bucket"])
        return {}

    def _bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            raise AwsError("NoSuchBucket", "The specified bucket does not exist", status=404)
        return self.buckets[name]

    def _object(self, params: Params) -> Stored:
        stored = self._bucket(params["Bucket"]).objects.get(params["Key"])
        if stored is None:
            raise AwsError("NoSuchKey", "The specified key does not exist.", status=404)
        return stored

    def _put(self, params: Params) -> Answer:
        body = params.get("Body", b"")
        return {"ETag": self._store(params, body, f'"{_md5(body)}"', params)}

    def _store(self, params: Params, body: bytes, etag: str, like: Params) -> str:
        bucket = self._bucket(params["Bucket"])
        existing = bucket.objects.get(params["Key"])
        if params.get("IfNoneMatch") == "*" and existing is not None:
            raise _precondition_failed()
        if "IfMatch" in params:
            if existing is None:
                raise AwsError("NoSuchKey", "The specified key does not exist.", status=404)
            if existing.etag != params["IfMatch"]:
                raise _precondition_failed()
        kind = {name: like[name] for name in _KEPT if name in like}
        metadata = {name.lower(): text for name, text in like.get("Metadata", {}).items()}
        modified_at = datetime.fromtimestamp(int(self.now()), UTC)
        bucket.put(params["Key"], Stored(body, etag, modified_at, kind, metadata))
        return etag

    def _get(self, params: Params) -> Answer:
        answer, stored = self._described(params)
        if "Range" not in params:
            return {**answer, "Body": stored.body}
        first, end = _range(params["Range"], len(stored.body))
        body = stored.body[first:end]
        return {
            **answer,
            "Body": body,
            "ContentLength": len(body),
            "ContentRange": f"bytes {first}-{end - 1}/{len(stored.body)}",
        }

    def _head(self, params: Params) -> Answer:
        try:
            return self._described(params)[0]
        except AwsError as error:
            if error.code != "NoSuchKey":
                raise
            raise AwsError("NotFound", "Not Found", status=404) from None

    def _described(self, params: Params) -> tuple[Answer, Stored]:
        stored = self._object(params)
        if params.get("IfMatch", stored.etag) != stored.etag:
            raise _precondition_failed()
        if params.get("IfNoneMatch") in {stored.etag, "*"}:
            raise AwsError("NotModified", "Not Modified", status=304)
        answer = {
            "ETag": stored.etag,
            "ContentLength": len(stored.body),
            "LastModified": stored.modified_at,
            "Metadata": dict(stored.metadata),
            "ContentType": "binary/octet-stream",
            **stored.kind,
        }
        return answer, stored

    def _delete(self, params: Params) -> Answer:
        self._bucket(params["Bucket"]).remove(params["Key"])
        return {}

    def _delete_all(self, params: Params) -> Answer:
        bucket, request = self._bucket(params["Bucket"]), params["Delete"]
        keys = [named_object["Key"] for named_object in request["Objects"]]
        if not 1 <= len(keys) <= DELETED_MAX:
            raise AwsError("MalformedXML", "1 to 1000 keys are deleted at once")
        rate = self.fault_source.service_rates.s3.undeleted_rate
        left = [key for key in keys if self.fault_source.occurs("s3.undeleted", rate)]
        for key in keys:
            if key not in left:
                bucket.remove(key)
        gone = [] if request.get("Quiet") else [{"Key": key} for key in keys if key not in left]
        errors = [{"Key": key, "Code": "InternalError", "Message": ""} for key in left]
        return {name: rows for name, rows in (("Deleted", gone), ("Errors", errors)) if rows}

    def _list(self, params: Params) -> Answer:
        bucket, faults = self._bucket(params["Bucket"]), self.fault_source.service_rates.s3
        if "Delimiter" in params:
            raise NotImplementedError("s3.ListObjectsV2 with a delimiter")
        after = params.get("ContinuationToken") or params.get("StartAfter", "")
        most = min(params.get("MaxKeys", PAGE_KEYS_MAX), PAGE_KEYS_MAX)
        if self.fault_source.occurs("s3.truncated_list", faults.truncated_list_rate):
            most = min(most, faults.page_keys_max)
        keys = bucket.keys(params.get("Prefix", ""), after)
        page = [key for _, key in zip(range(most), keys, strict=False)]
        is_truncated = next(keys, None) is not None
        answer: Answer = {"IsTruncated": is_truncated, "KeyCount": len(page)}
        if is_truncated:
            answer["NextContinuationToken"] = page[-1]
        if page:
            answer["Contents"] = [_listed(key, bucket.objects[key]) for key in page]
        return answer

    def _copy(self, params: Params) -> Answer:
        source = self._object(params["CopySource"])
        if params.get("CopySourceIfMatch", source.etag) != source.etag:
            raise _precondition_failed()
        like = {**source.kind, "Metadata": source.metadata}
        etag = self._store(params, source.body, f'"{_md5(source.body)}"', like)
        at = self._object(params).modified_at
        return {"CopyObjectResult": {"ETag": etag, "LastModified": at}}

    def _begin(self, params: Params) -> Answer:
        self._bucket(params["Bucket"])
        self._number += 1
        name = f"upload-{self._number}"
        self.uploads[name] = Upload(params["Bucket"], params["Key"], dict(params))
        return {"Bucket": params["Bucket"], "Key": params["Key"], "UploadId": name}

    def _upload(self, params: Params) -> Upload:
        upload = self.uploads.get(params["UploadId"])
        if upload is None or (upload.bucket, upload.key) != (params["Bucket"], params["Key"]):
            raise AwsError("NoSuchUpload", "The specified upload does not exist.", status=404)
        return upload

    def _put_part(self, params: Params) -> Answer:
        upload, body = self._upload(params), params["Body"]
        assert 1 <= params["PartNumber"] <= PARTS_MAX
        etag = f'"{_md5(body)}"'
        upload.parts[params["PartNumber"]] = etag, body
        return {"ETag": etag}

    def _complete(self, params: Params) -> Answer:
        upload = self._upload(params)
        named = [(part["PartNumber"], part["ETag"]) for part in params["MultipartUpload"]["Parts"]]
        if not named or named != sorted(named):
            raise AwsError("InvalidPartOrder", "parts come in ascending order")
        if any(upload.parts.get(number, ("",))[0] != etag for number, etag in named):
            raise AwsError("InvalidPart", "One or more of the specified parts could not be found")
        bodies = [upload.parts[number][1] for number, _ in named]
        if any(len(body) < PART_BYTES_MIN for body in bodies[:-1]):
            raise AwsError("EntityTooSmall", "a part is smaller than 5 MiB")
        digests = b"".join(bytes.fromhex(etag.strip('"')) for _, etag in named)
        etag = f'"{_md5(digests)}-{len(named)}"'
        self._store(params, b"".join(bodies), etag, upload.params)
        del self.uploads[params["UploadId"]]
        return {"Bucket": upload.bucket, "Key": upload.key, "ETag": etag}

    def _abort(self, params: Params) -> Answer:
        self._upload(params)
        if self.fault_source.occurs(
            "s3.left_open", self.fault_source.service_rates.s3.left_open_rate
        ):
            raise AwsError("ServiceUnavailable", "not now", status=503)
        del self.uploads[params["UploadId"]]
        return {}


def _precondition_failed() -> AwsError:
    message = "At least one of the pre-conditions you specified did not hold"
    return AwsError("PreconditionFailed", message, status=412)


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _range(text: str, size_bytes: int) -> tuple[int, int]:
    """The first byte of a range and the byte after its last, for the forms that the engine
    sends."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    start = int(first)
    end = min(int(last) + 1, size_bytes) if last else size_bytes
    if start >= size_bytes:
        raise AwsError("InvalidRange", "The requested range is not satisfiable", status=416)
    return start, end


def _listed(key: str, stored: Stored) -> Answer:
    return {
        "Key": key,
        "Size": len(stored.body),
        "ETag": stored.etag,
        "LastModified": stored.modified_at,
    }


def _refused(status: int, code: str) -> Answered:
    return (
        status,
        {"content-type": "application/xml"},
        f"<Error><Code>{code}</Code></Error>".encode(),
    )


def _as_http(answer: Answer, params: Params) -> Answered:
    headers = {"etag": answer["ETag"]}
    body: bytes = answer.get("Body", b"")
    kind = params.get("ResponseContentType") or answer.get("ContentType")
    if "Body" in answer and kind is not None:
        headers["content-type"] = kind
    if "ResponseContentDisposition" in params:
        headers["content-disposition"] = params["ResponseContentDisposition"]
    if "ContentRange" in answer:
        headers["content-range"] = answer["ContentRange"]
    headers["content-length"] = str(len(body))
    return 206 if "ContentRange" in answer else 200, headers, body
