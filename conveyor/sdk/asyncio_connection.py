"""AsyncioConnection: sends the calls of the asyncio client and repeats them after outages.

Calls and single files go through httpx. Many files go through the HTTP pool of `downloads.py`, in a
Trio event loop in a thread: the pool takes a fraction of the CPU time of httpx.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import IO, Self, TypeVar

import httpx
import trio

from conveyor.schemas.responses import UploadTarget
from conveyor.sdk.connection import PIECE_BYTES, check_key, check_url, is_loopback
from conveyor.sdk.downloads import (
    REDIRECTS_MAX,
    Bodies,
    Damaged,
    Download,
    Downloaded,
    is_direct,
    make_pool,
    replacing,
)
from conveyor.sdk.errors import ApiError, RetryPolicy, SdkError, Unreachable, error_from
from conveyor.sdk.operations import Call

T = TypeVar("T")


class AsyncioConnection:
    """The connection to one server. AsyncioClient knows the operations."""

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
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            headers={"Accept-Encoding": "identity", "User-Agent": "conveyor-sdk"},
            trust_env=not is_loopback(self.base_url),
        )

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
            try:
                response = await self._http.send(request)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            return call.read(response.status_code, response.headers, response.content)

        return await self._retrying(once)

    async def _retrying(self, once: Callable[[], Awaitable[T]]) -> T:
        for attempt in count(1):
            try:
                return await once()
            except SdkError as error:
                luck = random.random()  # noqa: S311 (it spreads load, it keeps no secret)
                pause_s = self._retry.pause_s(error, attempt=attempt, luck=luck)
                if pause_s is None:
                    raise
            await self._sleep(pause_s)
        raise AssertionError("a policy gives up in the end")

    def _request(self, call: Call[T], key: str) -> httpx.Request:
        headers = {"X-API-Key": self._api_key}
        if call.method == "POST":
            headers["Idempotency-Key"] = key
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        return self._http.build_request(
            call.method,
            self.base_url + call.path,
            params=dict(call.query) or None,
            content=call.body,
            headers=headers,
        )

    async def _put_file(self, target: UploadTarget, path: Path) -> None:
        """Uploads a file without the API key: the URL may belong to a foreign storage."""

        async def once() -> None:
            try:
                with path.open("rb") as file:
                    length = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
                    async with aclosing(_pieces_of(file)) as pieces:
                        response = await self._http.request(
                            target.method,
                            target.url,
                            content=pieces,
                            headers={**(target.headers or {}), **length},
                        )
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            if not response.is_success:
                raise error_from(response.status_code, response.headers, response.content)

        await self._retrying(once)

    async def _content(self, call: Call[None]) -> bytes:
        async def once() -> bytes:
            async with self._streaming(call) as response:
                return await response.aread()

        return await self._retrying(once)

    async def _save(self, call: Call[None], path: Path) -> Downloaded:
        return await self._retrying(lambda: self._save_once(call, path))

    _save_large = _save

    async def _save_once(self, call: Call[None], path: Path) -> Downloaded:
        async with self._streaming(call) as response:
            with replacing(path) as file:
                download = Download(file)
                async for piece in response.aiter_bytes(PIECE_BYTES):
                    download.take(piece)
                return download.finish(response.headers)

    async def _save_all(
        self, files: Mapping[str, tuple[Call[None], Path]]
    ) -> dict[str, Downloaded | ApiError]:
        """Through a proxy, which the pool does not use, it saves one at a time."""
        if self._http.is_closed:
            raise RuntimeError("Cannot send a request, as the client has been closed.")
        if not is_direct(self.base_url, trust_env=self._http.trust_env):
            return {
                name: await self._save_or_error(call, path) for name, (call, path) in files.items()
            }

        async def save() -> dict[str, Downloaded | ApiError]:
            pool = make_pool(self._timeout_s)
            try:
                bodies = Bodies(pool, self.base_url, self._api_key, self._retry)
                return await bodies.save_all(files)
            finally:
                pool.close()

        return await _run_in_trio_thread(save)

    async def _save_or_error(self, call: Call[None], path: Path) -> Downloaded | ApiError:
        try:
            return await self._save(call, path)
        except ApiError as error:
            return error

    @asynccontextmanager
    async def _streaming(self, call: Call[None]) -> AsyncIterator[httpx.Response]:
        """Yields the response to a call. Its body is not read yet."""
        try:
            response = await self._follow(self._request(call, ""))
            try:
                if not response.is_success:
                    content = await response.aread()
                    raise error_from(response.status_code, response.headers, content)
                yield response
            finally:
                await response.aclose()
        except (httpx.TransportError, Damaged) as error:
            raise self._unreachable(error) from error

    async def _follow(self, request: httpx.Request) -> httpx.Response:
        """Follows redirects, without the API key: only the Conveyor server may get the key."""
        response = await self._http.send(request, stream=True)
        for _ in range(REDIRECTS_MAX):
            if response.next_request is None:
                break
            await response.aclose()
            response.next_request.headers.pop("X-API-Key", None)
            response = await self._http.send(response.next_request, stream=True)
        return response

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(self.base_url, str(error) or type(error).__name__)


async def _pieces_of(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


async def _run_in_trio_thread(work: Callable[[], Awaitable[T]]) -> T:
    """Runs `work` in a Trio event loop in a thread. A cancellation cancels it there, and waits
    until it has ended."""
    scope, entered = trio.CancelScope(), Future[trio.lowlevel.TrioToken]()

    async def run() -> T | None:
        entered.set_result(trio.lowlevel.current_trio_token())
        with scope:
            return await work()
        return None

    running = asyncio.ensure_future(asyncio.to_thread(trio.run, run))
    try:
        done = await asyncio.shield(running)
    except asyncio.CancelledError:
        token = await asyncio.wrap_future(entered)
        token.run_sync_soon(scope.cancel)
        await asyncio.wait([running])
        raise
    assert done is not None
    return done
