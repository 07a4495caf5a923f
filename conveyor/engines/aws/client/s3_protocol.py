"""The REST protocol of S3 as tables: the place of each parameter in a request, and of each field in
an answer (docs/engines.md, AWS client)."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import msgspec

from conveyor.engines.aws_signature import escape_path

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_META = "x-amz-meta-"


class Operation(msgspec.Struct, frozen=True):
    """`query` and `headers` map parameters to names on the wire. `fixed` is always sent."""

    method: str
    query: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    fixed: tuple[tuple[str, str], ...] = ()


_VERSION = {"VersionId": "versionId"}
_PART = {"UploadId": "uploadId", "PartNumber": "partNumber"}
_IF = {"IfMatch": "if-match", "IfNoneMatch": "if-none-match"}
_KIND = {
    "ContentType": "content-type",
    "ContentEncoding": "content-encoding",
    "CacheControl": "cache-control",
    "StorageClass": "x-amz-storage-class",
}
_READ = {**_IF, "Range": "range", "ChecksumMode": "x-amz-checksum-mode"}

OPERATIONS = {
    "PutObject": Operation("PUT", {}, {**_IF, **_KIND}),
    "GetObject": Operation(
        "GET",
        {
            **_VERSION,
            "ResponseContentType": "response-content-type",
            "ResponseContentDisposition": "response-content-disposition",
        },
        _READ,
    ),
    "HeadObject": Operation("HEAD", _VERSION, _READ),
    "DeleteObject": Operation("DELETE", _VERSION, {"IfMatch": "if-match"}),
    "DeleteObjects": Operation("POST", fixed=(("delete", ""),)),
    "ListObjectsV2": Operation(
        "GET",
        {
            "Prefix": "prefix",
            "Delimiter": "delimiter",
            "MaxKeys": "max-keys",
            "StartAfter": "start-after",
            "ContinuationToken": "continuation-token",
        },
        # Keys may contain characters that XML cannot express, so S3 escapes them on request.
        fixed=(("list-type", "2"), ("encoding-type", "url")),
    ),
    "CopyObject": Operation(
        "PUT",
        {},
        {
            **_IF,
            **_KIND,
            "CopySourceIfMatch": "x-amz-copy-source-if-match",
            "MetadataDirective": "x-amz-metadata-directive",
        },
    ),
    "CreateMultipartUpload": Operation("POST", {}, _KIND, (("uploads", ""),)),
    "UploadPart": Operation("PUT", _PART),
    "CompleteMultipartUpload": Operation("POST", _PART, _IF),
    "AbortMultipartUpload": Operation("DELETE", _PART),
}

_ANSWER_HEADERS = {
    b"etag": "ETag",
    b"x-amz-version-id": "VersionId",
    b"content-type": "ContentType",
    b"content-encoding": "ContentEncoding",
    b"content-range": "ContentRange",
    b"content-length": "ContentLength",
    b"last-modified": "LastModified",
}
_NO_BODY_CODES = {304: "NotModified", 403: "Forbidden", 404: "NotFound", 412: "PreconditionFailed"}


def query_of(operation: Operation, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = operation.query.items()
    return [
        *operation.fixed,
        *((wire, str(params[name])) for name, wire in named if name in params),
    ]


def headers_of(operation: Operation, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    headers = [(wire, params[name]) for name, wire in operation.headers.items() if name in params]
    headers += [(_META + name.lower(), value) for name, value in params.get("Metadata", {}).items()]
    if "CopySource" in params:
        headers.append(("x-amz-copy-source", _copy_source(params["CopySource"])))
    return headers


def body_of(name: str, params: Mapping[str, Any]) -> bytes:
    """Returns the XML body of the operations that have one, and otherwise the caller's body."""
    if name == "DeleteObjects":
        return _delete_xml(params["Delete"])
    if name == "CompleteMultipartUpload":
        parts = params["MultipartUpload"]["Parts"]
        return _xml("CompleteMultipartUpload", "".join(_element("Part", part) for part in parts))
    body: bytes = params.get("Body", b"")
    return body


def body_headers(name: str, body: bytes) -> list[tuple[str, str]]:
    if name != "DeleteObjects":
        return []
    # The protocol requires this digest. It protects against transmission errors, not attacks.
    return [("content-md5", b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode())]


def answer_of(name: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> dict[str, Any]:
    """Returns the answer as botocore would, for the fields of `_ANSWER_HEADERS` and the bodies."""
    match name:
        case "ListObjectsV2":
            return _listing(_parse(body))
        case "DeleteObjects":
            root = _parse(body)
            fields = {
                "Deleted": [_strings(element) for element in _all(root, "Deleted")],
                "Errors": [_strings(element) for element in _all(root, "Error")],
            }
            return {field: rows for field, rows in fields.items() if rows}
        case "CreateMultipartUpload" | "CompleteMultipartUpload":
            return {**_from_headers(headers, is_written=True), **_strings(_parse(body))}
        case "CopyObject":
            result: dict[str, Any] = _strings(_parse(body))
            result["LastModified"] = datetime.fromisoformat(result["LastModified"])
            written = _from_headers(headers, is_written=True)
            # botocore returns the ETag of a copy inside CopyObjectResult only.
            written.pop("ETag", None)
            return {**written, "CopyObjectResult": result}
        case "GetObject" | "HeadObject":
            return _from_headers(headers)
        case _:
            return _from_headers(headers, is_written=True)


def error_of(status: int, body: bytes) -> tuple[str, str]:
    """Returns code and message of a refusal, or of an error inside a 200 answer."""
    try:
        fields = _strings(_parse(body)) if body else {}
    except ElementTree.ParseError:
        fields = {}
    code = fields.get("Code") or _NO_BODY_CODES.get(status, str(status))
    return code, fields.get("Message", "")


def is_hidden_error(name: str, body: bytes) -> bool:
    """S3 sends the 200 of a copy or a completion before the operation ends. A later failure is an
    error document in the body of the 200."""
    late = name in {"CopyObject", "CompleteMultipartUpload"}
    return late and b"<Error>" in body


def _from_headers(
    headers: Sequence[tuple[bytes, bytes]], *, is_written: bool = False
) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for name, value in headers:
        field = _ANSWER_HEADERS.get(name)
        text = value.decode("latin-1")
        if field is not None and (not is_written or field in {"ETag", "VersionId"}):
            answer[field] = _header_value(field, text)
        elif name.startswith(_META.encode()):
            metadata[name.decode()[len(_META) :]] = text
    if not is_written:
        answer["Metadata"] = metadata
    return answer


def _header_value(field: str, text: str) -> Any:
    if field == "ContentLength":
        return int(text)
    return parsedate_to_datetime(text) if field == "LastModified" else text


def _listing(root: ElementTree.Element) -> dict[str, Any]:
    top = _strings(root)
    is_escaped = top.get("EncodingType") == "url"
    answer: dict[str, Any] = {
        "IsTruncated": top.get("IsTruncated") == "true",
        "KeyCount": int(top.get("KeyCount", "0")),
    }
    if "NextContinuationToken" in top:
        answer["NextContinuationToken"] = top["NextContinuationToken"]
    rows = [_strings(element) for element in _all(root, "Contents")]
    if rows:
        answer["Contents"] = [_object(row, is_escaped=is_escaped) for row in rows]
    prefixes = [_strings(element)["Prefix"] for element in _all(root, "CommonPrefixes")]
    if prefixes:
        answer["CommonPrefixes"] = [
            {"Prefix": unquote_plus(prefix) if is_escaped else prefix} for prefix in prefixes
        ]
    return answer


def _object(row: Mapping[str, str], *, is_escaped: bool) -> dict[str, Any]:
    return {
        "Key": unquote_plus(row["Key"]) if is_escaped else row["Key"],
        "Size": int(row["Size"]),
        "ETag": row["ETag"],
        "LastModified": datetime.fromisoformat(row["LastModified"]),
    }


def _parse(body: bytes) -> ElementTree.Element:
    return ElementTree.fromstring(body)  # noqa: S314 - Of a service we trust, and Expat bounds what entities expand to.


def _strings(element: ElementTree.Element) -> dict[str, str]:
    return {_name(child): child.text or "" for child in element if not len(child)}


def _all(root: ElementTree.Element, name: str) -> Iterable[ElementTree.Element]:
    return (child for child in root if _name(child) == name)


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _copy_source(source: Mapping[str, str] | str) -> str:
    if isinstance(source, str):
        return escape_path(source)
    version = f"?versionId={source['VersionId']}" if "VersionId" in source else ""
    return escape_path(f"{source['Bucket']}/{source['Key']}") + version


def _delete_xml(delete: Mapping[str, Any]) -> bytes:
    quiet = "<Quiet>true</Quiet>" if delete.get("Quiet") else ""
    return _xml("Delete", quiet + "".join(_element("Object", entry) for entry in delete["Objects"]))


def _element(name: str, fields: Mapping[str, Any]) -> str:
    inner = "".join(f"<{key}>{escape(str(value))}</{key}>" for key, value in fields.items())
    return f"<{name}>{inner}</{name}>"


def _xml(root: str, inner: str) -> bytes:
    return f'<{root} xmlns="{_NAMESPACE}">{inner}</{root}>'.encode()
