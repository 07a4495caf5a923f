"""HttpTransport: calls DynamoDB, SQS, S3 and Step Functions over `conveyor/http_client/` and signs
the requests itself (docs/engines.md, AWS client).

The problem: a worker makes several AWS calls per page, and botocore needs threads or asyncio and
interprets a model of the service for every call.

The alternatives (decision 0021):

- aioboto3 for all calls. It needs trio-asyncio, and a call costs about twenty times as much as here
  (`python -m bench awsclient`). It remains as `BotoTransport`: for operations that this module does
  not have, and as the reference that the tests compare this module with.
- This transport. It has no service models. DynamoDB, SQS and Step Functions take their parameters
  as JSON and return JSON, so parameters and answers pass through unchanged. Only S3 needs tables
  (s3_protocol.py). The price is that a new operation of S3 needs a few lines there.

The signature contains the time. The transport uses the machine's clock until a service reports that
it is wrong. Then it computes the difference from the `Date` header of that answer and adds it to
all later signatures.
"""

from __future__ import annotations

import zlib
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from conveyor.domain.submit.target import Target
from conveyor.engines.aws.client import s3_protocol
from conveyor.engines.aws.client.auth import AwsAccess
from conveyor.engines.aws.client.service_clock import ServiceClock, date_of
from conveyor.engines.aws.client.usage import Traffic
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.engines.aws_signature import (
    UNSIGNED,
    Scope,
    authorization,
    canonical_query,
    escape_path,
    payload_hash,
    presign_query,
    stamp,
)
from conveyor.http_client.errors import (
    BadRequest,
    ConnectFailed,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    OutOfResources,
    TlsFailed,
)
from conveyor.http_client.exchange import Request, StreamingResponse, Upload
from conveyor.http_client.pool import HttpPool

# The largest answer that is held in memory. Larger objects must be read with `open`.
WHOLE_BODY_BYTES_MAX = 64 * 1024 * 1024
# A smaller difference between the clocks is not the reason for a rejected signature. The error is
# then reported as it is, so that wrong keys do not cause retries.
SKEW_S_MAX = 60.0

# The JSON services take the operation in the `x-amz-target` header, with these prefixes.
_TARGETS = {
    "dynamodb": "DynamoDB_20120810.",
    "sqs": "AmazonSQS.",
    "stepfunctions": "AWSStepFunctions.",
}
# The name of a service in its signature, where it differs from its name in botocore.
_SIGNED_AS = {"stepfunctions": "states"}
_CONTENT_TYPE = "application/x-amz-json-1.0"
_ERROR_BODY_BYTES_MAX = 64 * 1024
# With these errors no byte of the request reached the service, so the call was certainly not
# applied and any operation may be retried.
_UNSENT = (
    BadRequest,
    ConnectFailed,
    ForbiddenTarget,
    NameNotResolved,
    OutOfResources,
    TlsFailed,
)
# Codes that a wrong clock may cause. Some of them also mean wrong keys, so `_correct_skew` compares
# the clocks before it believes them.
_SKEW_CODES = frozenset(
    {
        "InvalidSignatureException",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True, kw_only=True)
class HttpTransport:
    """Makes one attempt per call; see AwsTransport. `now` is the machine's wall clock; responses of
    DynamoDB correct `service_clock`."""

    access: AwsAccess
    pool: HttpPool
    now: Callable[[], float]
    traffic: Traffic = field(default_factory=Traffic)
    service_clock: ServiceClock | None = None
    skew_s: float = 0.0

    async def call(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> dict[str, Any]:
        if service in _TARGETS:
            return await self._call_json(service, operation, params, deadline_s)
        if service != "s3" or operation not in s3_protocol.OPERATIONS:
            raise ValueError(f"the lean plane has no {service}.{operation}")
        # Bodies that are streamed on either side go through `open`.
        if operation == "GetObject" or not isinstance(params.get("Body", b""), bytes):
            async with self.open(service, operation, params, deadline_s=deadline_s) as answer:
                body = await _first_bytes(answer.pop("Body"), WHOLE_BODY_BYTES_MAX)
            return {**answer, "Body": body} if operation == "GetObject" else answer
        body = s3_protocol.body_of(operation, params)
        request = await self._s3_request(operation, params, body, deadline_s)
        status, headers, received = await self._fetch(request)
        if status >= 300 or s3_protocol.is_hidden_error(operation, received):
            raise self._s3_error(status, headers, received)
        return s3_protocol.answer_of(operation, headers, received)

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        assert service == "s3"
        payload = params.get("Body", b"")
        upload = None if isinstance(payload, bytes) else Upload(payload, params["ContentLength"])
        body = s3_protocol.body_of(operation, params) if upload is None else None
        request = await self._s3_request(operation, params, body, deadline_s)
        try:
            async with self.pool.open(request, upload) as incoming:
                if incoming.status >= 300:
                    received = await _first_bytes(incoming, _ERROR_BODY_BYTES_MAX)
                    raise self._s3_error(incoming.status, incoming.headers, received)
                self.traffic.sent_bytes += upload.size_bytes if upload else len(body or b"")
                answer = s3_protocol.answer_of(operation, incoming.headers, b"")
                yield {**answer, "Body": self._count_received(incoming)}
        except FetchFailed as error:
            raise _no_answer(error) from error

    async def presign(self, operation: str, params: Mapping[str, Any], *, expires_s: int) -> str:
        """Returns a URL that permits this operation on this object without credentials.

        The request must carry the headers that the parameters make. The URL is valid for
        `expires_s`, or until the keys that sign it expire, if that is earlier.
        """
        entry = s3_protocol.OPERATIONS[operation]
        target, scope = await self._s3_target(params)
        now = self.now() + self.skew_s
        # A URL cannot outlive the keys that sign it. The stated lifetime is shortened, so that S3
        # does not refuse a URL that still claims to be valid.
        keys_until = scope.credentials.expires_at
        if keys_until is not None:
            expires_s = max(1, min(expires_s, int(keys_until - now)))
        query = presign_query(
            entry.method,
            target.path_and_query,
            s3_protocol.query_of(entry, params),
            [("host", target.authority), *s3_protocol.headers_of(entry, params)],
            scope=scope,
            now=now,
            expires_s=expires_s,
        )
        return f"{target.url}?{query}"

    async def _call_json(
        self, service: str, operation: str, params: Mapping[str, Any], deadline_s: float
    ) -> dict[str, Any]:
        started_at = trio.current_time()
        target = await self.access.endpoint(service)
        body = _encode(params)
        headers = [
            ("content-type", _CONTENT_TYPE),
            ("x-amz-target", _TARGETS[service] + operation),
        ]
        scope = await self._scope(service)
        headers = self._sign("POST", target, "", headers, payload_hash(body), scope)
        request = Request(
            method="POST",
            target=target,
            headers=headers,
            body=body,
            deadline_s=deadline_s - (trio.current_time() - started_at),
            body_bytes_max=WHOLE_BODY_BYTES_MAX,
        )
        clock = self.service_clock if service == "dynamodb" else None
        sent_at = 0.0 if clock is None else clock.steady()
        status, answer_headers, received = await self._fetch(request)
        if clock is not None:
            clock.observe(answer_headers, sent_at=sent_at)
        if status != 200:
            raise self._json_error(status, answer_headers, received)
        _check_crc32(answer_headers, received)
        try:
            answer: dict[str, Any] = _decode(received) if received else {}
        except msgspec.DecodeError as error:
            raise NoResponse("the answer is not JSON", was_sent=True) from error
        # Almost no answer has binary values. The search in the raw bytes saves the walk over all
        # decoded values.
        if b'"B"' in received or b'"BS"' in received:
            _decode_binaries(answer)
        return answer

    async def _s3_request(
        self, name: str, params: Mapping[str, Any], body: bytes | None, deadline_s: float
    ) -> Request:
        """Returns the request of an operation. If `body` is None, the body is streamed later and
        is not signed."""
        operation = s3_protocol.OPERATIONS[name]
        # Credentials and endpoint may take time. That time counts towards the deadline.
        started_at = trio.current_time()
        target, scope = await self._s3_target(params)
        deadline_s -= trio.current_time() - started_at
        query = canonical_query(s3_protocol.query_of(operation, params))
        payload = UNSIGNED if body is None else payload_hash(body)
        headers = [("x-amz-content-sha256", payload), *s3_protocol.headers_of(operation, params)]
        if body:
            headers += s3_protocol.body_headers(name, body)
        headers = self._sign(operation.method, target, query, headers, payload, scope)
        if query:
            path = f"{target.path_and_query}?{query}"
            target = Target(target.scheme, target.host, target.port, path)
        return Request(
            method=operation.method,
            target=target,
            headers=headers,
            body=body or None,
            deadline_s=deadline_s,
            body_bytes_max=WHOLE_BODY_BYTES_MAX,
        )

    async def _s3_target(self, params: Mapping[str, Any]) -> tuple[Target, Scope]:
        at = await self.access.endpoint("s3")
        scope = await self._scope("s3")
        bucket, key = params["Bucket"], escape_path(params.get("Key", ""))
        # AWS prefers the bucket in the host name. A bucket with a dot would not match the wildcard
        # of AWS's TLS certificate, and other servers may have no such host names. Both get the
        # bucket in the path.
        if at.host.endswith(".amazonaws.com") and "." not in bucket:
            return Target(at.scheme, f"{bucket}.{at.host}", at.port, f"/{key}"), scope
        path = f"/{bucket}/{key}" if key else f"/{bucket}"
        return Target(at.scheme, at.host, at.port, path), scope

    async def _scope(self, service: str) -> Scope:
        name = _SIGNED_AS.get(service, service)
        return Scope(name, self.access.region, await self.access.credentials())

    def _sign(
        self,
        method: str,
        target: Target,
        query: str,
        headers: list[tuple[str, str]],
        payload: str,
        scope: Scope,
    ) -> list[tuple[str, str]]:
        headers.append(("x-amz-date", stamp(self.now() + self.skew_s)))
        if scope.credentials.token:
            headers.append(("x-amz-security-token", scope.credentials.token))
        # The HTTP client adds `host` itself, so it is signed here but not appended to the headers.
        to_sign = [*headers, ("host", target.authority)]
        proof = authorization(method, target.path_and_query, query, to_sign, payload, scope)
        headers.append(("authorization", proof))
        return headers

    async def _fetch(self, request: Request) -> tuple[int, Headers, bytes]:
        try:
            response = await self.pool.fetch(request)
        except FetchFailed as error:
            raise _no_answer(error) from error
        self.traffic.sent_bytes += len(request.body or b"")
        self.traffic.received_bytes += len(response.body)
        return response.status, response.headers, response.body

    async def _count_received(self, incoming: StreamingResponse) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in incoming:
                self.traffic.received_bytes += len(piece)
                yield piece
        except FetchFailed as error:
            raise _no_answer(error) from error

    def _json_error(self, status: int, headers: Headers, body: bytes) -> AwsError:
        try:
            said: dict[str, Any] = _decode(body)
        except msgspec.DecodeError:
            said = {}
        # The code may have a namespace before `#` and a URL after `:`.
        code = str(said.get("__type", status)).rpartition("#")[2].partition(":")[0]
        message = said.get("message") or said.get("Message") or ""
        reasons = [reason.get("Code") or "None" for reason in said.get("CancellationReasons") or ()]
        code = self._correct_skew(code, headers)
        return AwsError(code, message, status=status, reasons=reasons)

    def _s3_error(self, status: int, headers: Headers, body: bytes) -> AwsError:
        code, message = s3_protocol.error_of(status, body)
        # S3 sent 200 and then an error in the body: the outcome is unknown, as after a 500.
        status = 500 if status == 200 else status
        return AwsError(self._correct_skew(code, headers), message, status=status)

    def _correct_skew(self, code: str, headers: Headers) -> str:
        """Corrects `skew_s` from the answer's `Date` if the clocks differ.

        Returns the code to report: RequestTimeTooSkewed, which is retried, if the skew was
        corrected, and the code of the service otherwise.
        """
        if code not in _SKEW_CODES:
            return code
        date = date_of(headers)
        if date is None:
            return code
        skew_s = date - self.now()
        if abs(skew_s - self.skew_s) < SKEW_S_MAX:
            return code
        self.skew_s = skew_s
        return "RequestTimeTooSkewed"


def _no_answer(error: FetchFailed) -> NoResponse:
    return NoResponse(error.detail, was_sent=not isinstance(error, _UNSENT))


def _check_crc32(headers: Headers, body: bytes) -> None:
    # DynamoDB sends this checksum of the body. A damaged answer is treated as a lost one, because
    # the call was applied.
    for name, value in headers:
        if name == b"x-amz-crc32" and int(value) != zlib.crc32(body):
            raise NoResponse("the answer was damaged on its way", was_sent=True)


async def _first_bytes(pieces: AsyncIterator[bytes], bytes_max: int) -> bytes:
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > bytes_max:
            raise NoResponse(f"the body is larger than {bytes_max} bytes", was_sent=True)
    return bytes(content)


def _decode_binaries(value: Any) -> Any:
    """Decodes base64 values in place.

    `{"B": text}` is always a binary value: an attribute with the name B contains another dict, not
    a text.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "B" and isinstance(inner, str) and len(value) == 1:
                value[key] = b64decode(inner)
            elif key == "BS" and isinstance(inner, list) and len(value) == 1:
                value[key] = [b64decode(text) for text in inner]
            else:
                _decode_binaries(inner)
    elif isinstance(value, list):
        for inner in value:
            _decode_binaries(inner)
    return value
