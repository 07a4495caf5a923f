"""TrioConnection: sends the calls of the Trio client over the pool and repeats them after outages.

Where only a proxy of the environment leads to the server, httpx takes the place of the pool.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import urlencode

import httpx
import trio

from conveyor.domain.submit.target import BadUrl, parse_url
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.exchange import Request, Response
from conveyor.http_client.httpx_transport import PoolTransport
from conveyor.http_client.pool import HttpPool
from conveyor.schemas.responses import UploadTarget
from conveyor.sdk.connection import PIECE_BYTES, check_key, check_url, is_loopback
from conveyor.sdk.downloads import (
    Bodies,
    Damaged,
    Download,
    Downloaded,
    headers_of,
    is_direct,
    make_pool,
    replacing,
    retrying,
)
from conveyor.sdk.errors import ApiError, RetryPolicy, Unreachable, error_from
from conveyor.sdk.operations import Call

T = TypeVar("T")


class TrioConnection:
    """The connection to one server. TrioClient knows the operations."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout_s: float = 30.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Raises ValueError for an invalid `base_url` or `api_key`."""
        self.base_url = check_url(base_url)
        self._api_key = check_key(api_key)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        if is_direct(self.base_url, trust_env=not is_loopback(self.base_url)):
            self._pool: HttpPool | ProxiedPool = (pool := make_pool(timeout_s))
            # For files of any size: each wait has a timeout, but the whole transfer has none.
            transport = PoolTransport(pool, deadline_s=math.inf, body_bytes_max=sys.maxsize)
            self._http = httpx.AsyncClient(transport=transport, timeout=timeout_s, trust_env=False)
        else:
            self._http = httpx.AsyncClient(timeout=timeout_s)
            self._pool = ProxiedPool(self._http)
        self._bodies = Bodies(self._pool, self.base_url, self._api_key, self._retry)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        """Closes the connections. It is not named `close`, because `close` closes a job."""
        await self._http.aclose()

    async def _ask(self, call: Call[T], key: str | None = None) -> T:
        request = self._request(call, key or secrets.token_hex(16))

        async def once() -> T:
            response = await self._fetch(request)
            return call.read(response.status, headers_of(response), response.body)

        return await self._retrying(once)

    async def _put_file(self, target: UploadTarget, path: Path) -> None:
        """Uploads a file without the API key: the URL may belong to a foreign storage."""
        await self._retrying(lambda: self._put_once(target, path))

    async def _put_once(self, target: UploadTarget, path: Path) -> None:
        length = {"Content-Length": str((await trio.Path(path).stat()).st_size)}
        try:
            async with aclosing(_pieces_of(path)) as pieces:
                response = await self._http.request(
                    target.method,
                    target.url,
                    content=pieces,
                    headers={**(target.headers or {}), **length},
                )
        except httpx.TransportError as error:
            raise Unreachable(self.base_url, str(error) or type(error).__name__) from error
        if not response.is_success:
            raise error_from(response.status_code, response.headers, response.content)

    async def _content(self, call: Call[None]) -> bytes:
        return await self._retrying(lambda: self._bodies.load(call))

    async def _save(self, call: Call[None], path: Path) -> Downloaded:
        self._refuse_if_closed()
        return await self._bodies.save(call, path)

    async def _save_all(
        self, files: Mapping[str, tuple[Call[None], Path]]
    ) -> dict[str, Downloaded | ApiError]:
        self._refuse_if_closed()
        return await self._bodies.save_all(files)

    async def _save_large(self, call: Call[None], path: Path) -> Downloaded:
        """Saves a file of any size, piece by piece."""
        return await self._retrying(lambda: self._save_pieces(call, path))

    async def _sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    def _now_s(self) -> float:
        return trio.current_time()

    async def _save_pieces(self, call: Call[None], path: Path) -> Downloaded:
        headers = {"X-API-Key": self._api_key, "Accept-Encoding": "identity"}
        try:
            url = self.base_url + call.path
            async with self._http.stream("GET", url, headers=headers) as response:
                if not response.is_success:
                    raise error_from(response.status_code, response.headers, await response.aread())
                with replacing(path) as file:
                    download = Download(file)
                    async for piece in response.aiter_bytes(PIECE_BYTES):
                        download.take(piece)
                    return download.finish(response.headers)
        except (httpx.TransportError, Damaged) as error:
            raise Unreachable(self.base_url, str(error) or type(error).__name__) from error

    def _refuse_if_closed(self) -> None:
        # The other clients do so. The pool would connect again, and nobody would close that.
        if self._http.is_closed:
            raise RuntimeError("Cannot send a request, as the client has been closed.")

    async def _retrying(self, once: Callable[[], Awaitable[T]]) -> T:
        self._refuse_if_closed()
        return await retrying(self._retry, once)

    def _request(self, call: Call[T], key: str) -> Request:
        headers = [("X-API-Key", self._api_key), ("User-Agent", "conveyor-sdk")]
        if call.method == "POST":
            headers.append(("Idempotency-Key", key))
        if call.body is not None:
            headers.append(("Content-Type", "application/json"))
        query = f"?{urlencode(call.query)}" if call.query else ""
        target = parse_url(self.base_url + call.path + query)
        if isinstance(target, BadUrl):
            raise Unreachable(self.base_url, target.detail)
        return Request(
            method=call.method,
            target=target,
            headers=headers,
            body=call.body,
            deadline_s=self._timeout_s,
        )

    async def _fetch(self, request: Request) -> Response:
        try:
            return await self._pool.fetch(request)
        except FetchFailed as error:
            raise Unreachable(self.base_url, error.detail) from error


class ProxiedPool:
    """Fetches as HttpPool does, but through the proxies of the environment, with httpx."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def fetch(self, request: Request) -> Response:
        target = request.target
        try:
            with trio.fail_after(request.deadline_s):
                response = await self._http.request(
                    request.method,
                    f"{target.scheme}://{target.authority}{target.path_and_query}",
                    content=request.body,
                    headers=[("Accept-Encoding", "identity"), *request.headers],
                )
        except (httpx.TransportError, trio.TooSlowError) as error:
            raise FetchFailed(str(error) or type(error).__name__) from error
        headers = [(name.lower(), value) for name, value in response.headers.raw]
        return Response(response.status_code, headers, response.content)


async def _pieces_of(path: Path) -> AsyncGenerator[bytes, None]:
    async with await trio.open_file(path, "rb") as file:
        while piece := await file.read(PIECE_BYTES):
            yield piece
