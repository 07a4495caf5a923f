"""BotoTransport: aioboto3 through trio-asyncio, for operations that HttpTransport lacks and as its
reference (docs/engines.md, AWS client)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aioboto3
import aiohttp
import botocore.exceptions
import trio
import trio_asyncio
from aiobotocore.config import AioConfig
from botocore import xform_name

from conveyor.engines.aws.client.auth import AwsAccess
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.engines.aws_signature import Credentials

PIECE_BYTES = 256 * 1024

# HEAD answers have no body, so botocore reports the status as the code.
_CODES = {"304": "NotModified", "403": "Forbidden", "404": "NotFound", "412": "PreconditionFailed"}
_UNSENT = (
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ParamValidationError,
    botocore.exceptions.NoCredentialsError,
)


@dataclass(slots=True, kw_only=True)
class BotoTransport:
    """Makes one attempt per call; see AwsTransport. botocore's own retries are off."""

    access: AwsAccess
    _loop: Any
    _stack: AsyncExitStack
    _session: Any = field(default_factory=aioboto3.Session)
    _clients: dict[tuple[str, Credentials], Any] = field(default_factory=dict)
    _lock: trio.Lock = field(default_factory=trio.Lock)

    async def call(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> dict[str, Any]:
        body = params.get("Body")
        # botocore takes no async iterator, so a streamed body is collected in memory here.
        if body is not None and not isinstance(body, bytes):
            params = {**params, "Body": b"".join([piece async for piece in body])}
        async with self.open(service, operation, params, deadline_s=deadline_s) as answer:
            if operation == "GetObject":
                answer["Body"] = b"".join([piece async for piece in answer["Body"]])
            return answer

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        # The caller's task may have been started outside the loop's context.
        trio_asyncio.current_loop.set(self._loop)
        client = await self._client(service)
        method = getattr(client, xform_name(operation))
        with _translating():
            with trio.fail_after(deadline_s):
                answer = await trio_asyncio.aio_as_trio(method)(**params)
            answer.pop("ResponseMetadata", None)
            stream = answer.get("Body") if operation == "GetObject" else None
            if stream is None:
                yield answer
                return
            try:
                yield {**answer, "Body": _pieces(stream)}
            finally:
                stream.close()

    async def _client(self, service: str) -> Any:
        """Returns the client for the current keys. Renewed keys get a new client."""
        keys = await self.access.credentials()
        async with self._lock:
            if (service, keys) not in self._clients:
                self._clients[service, keys] = await self._make_client(service, keys)
            return self._clients[service, keys]

    async def _make_client(self, service: str, keys: Credentials) -> Any:
        target = await self.access.endpoint(service)
        config = AioConfig(
            # One attempt: RetryingAwsClient is the only layer that retries.
            retries={"total_max_attempts": 1},
            parameter_validation=False,
            # HttpTransport sends no such checksums either.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "auto"},
            max_pool_connections=64,
        )
        client = self._session.client(
            service,
            region_name=self.access.region,
            endpoint_url=target.url.removesuffix("/"),
            aws_access_key_id=keys.access_key,
            aws_secret_access_key=keys.secret_key,
            aws_session_token=keys.token,
            config=config,
        )
        return await self._stack.enter_async_context(trio_asyncio.aio_as_trio(client))


@asynccontextmanager
async def open_boto_transport(access: AwsAccess) -> AsyncGenerator[BotoTransport, None]:
    async with trio_asyncio.open_loop() as loop, AsyncExitStack() as stack:
        yield BotoTransport(access=access, _loop=loop, _stack=stack)


async def _pieces(stream: Any) -> AsyncIterator[bytes]:
    while piece := await trio_asyncio.aio_as_trio(stream.read)(PIECE_BYTES):
        yield piece


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise _refusal(error.response) from error
    except botocore.exceptions.BotoCoreError as error:
        was_sent = not isinstance(error, _UNSENT)
        raise NoResponse(type(error).__name__, was_sent=was_sent) from error
    except (trio.TooSlowError, aiohttp.ClientError, OSError) as error:
        raise NoResponse(type(error).__name__, was_sent=True) from error


def _refusal(response: Mapping[str, Any]) -> AwsError:
    said = response.get("Error", {})
    # SQS states the code of its old query protocol too, and botocore keeps it here.
    code = said.get("QueryErrorCode") or said.get("Code", "")
    reasons = [reason.get("Code") or "None" for reason in response.get("CancellationReasons") or ()]
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    return AwsError(_CODES.get(code, code), said.get("Message", ""), status=status, reasons=reasons)
