"""Connection: sends the calls of the synchronous client and repeats them after outages."""

from __future__ import annotations

import ipaddress
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx

from conveyor.schemas.responses import UploadTarget
from conveyor.sdk.downloads import (
    REDIRECTS_MAX,
    Damaged,
    Download,
    Downloaded,
    is_direct,
    replacing,
    save_all,
)
from conveyor.sdk.errors import ApiError, RetryPolicy, SdkError, Unreachable, error_from
from conveyor.sdk.operations import Call

T = TypeVar("T")

PIECE_BYTES = 65_536


class Connection:
    """The connection to one server. Client knows the operations. TrioConnection has the same
    methods."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout_s: float = 30.0,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError for an invalid `base_url` or `api_key`."""
        self.base_url = check_url(base_url)
        self._api_key = check_key(api_key)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._http = httpx.Client(
            timeout=timeout_s,
            headers={"Accept-Encoding": "identity", "User-Agent": "conveyor-sdk"},
            trust_env=not is_loopback(self.base_url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Closes the connections. It is not named `close`, because `close` closes a job."""
        self._http.close()

    def _ask(self, call: Call[T], key: str | None = None) -> T:
        request = self._request(call, key or secrets.token_hex(16))

        def once() -> T:
            try:
                response = self._http.send(request)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            return call.read(response.status_code, response.headers, response.content)

        return self._retrying(once)

    def _retrying(self, once: Callable[[], T]) -> T:
        for attempt in count(1):
            try:
                return once()
            except SdkError as error:
                luck = random.random()  # noqa: S311 (it spreads load, it keeps no secret)
                pause_s = self._retry.pause_s(error, attempt=attempt, luck=luck)
                if pause_s is None:
                    raise
            self._sleep(pause_s)
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

    def _save(self, call: Call[None], path: Path) -> Downloaded:
        return self._retrying(lambda: self._save_once(call, path))

    _save_large = _save

    def _save_all(
        self, files: Mapping[str, tuple[Call[None], Path]]
    ) -> dict[str, Downloaded | ApiError]:
        """Saves several files at a time, in a Trio event loop of its own. It must not be called
        inside one. Through a proxy, which the pool does not use, it saves one at a time."""
        if self._http.is_closed:
            raise RuntimeError("Cannot send a request, as the client has been closed.")
        if is_direct(self.base_url, trust_env=self._http.trust_env):
            timeout_s, retry = self._timeout_s, self._retry
            return save_all(self.base_url, self._api_key, files, timeout_s=timeout_s, retry=retry)
        return {name: self._save_or_error(call, path) for name, (call, path) in files.items()}

    def _save_or_error(self, call: Call[None], path: Path) -> Downloaded | ApiError:
        try:
            return self._save(call, path)
        except ApiError as error:
            return error

    def _now_s(self) -> float:
        return time.monotonic()

    def _put_file(self, target: UploadTarget, path: Path) -> None:
        """Uploads a file without the API key: the URL may belong to a foreign storage."""

        def once() -> None:
            try:
                with path.open("rb") as file:
                    response = self._http.request(
                        target.method, target.url, content=file, headers=target.headers
                    )
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            if not response.is_success:
                raise error_from(response.status_code, response.headers, response.content)

        self._retrying(once)

    def _content(self, call: Call[None]) -> bytes:
        return self._retrying(lambda: self._load(call))

    def _load(self, call: Call[None]) -> bytes:
        with self._streaming(call) as response:
            return response.read()

    def _save_once(self, call: Call[None], path: Path) -> Downloaded:
        with self._streaming(call) as response, replacing(path) as file:
            download = Download(file)
            for piece in response.iter_bytes(PIECE_BYTES):
                download.take(piece)
            return download.finish(response.headers)

    @contextmanager
    def _streaming(self, call: Call[None]) -> Iterator[httpx.Response]:
        """Yields the response to a call. Its body is not read yet."""
        try:
            with closing(self._follow(self._request(call, ""))) as response:
                if not response.is_success:
                    raise error_from(response.status_code, response.headers, response.read())
                yield response
        except (httpx.TransportError, Damaged) as error:
            raise self._unreachable(error) from error

    def _follow(self, request: httpx.Request) -> httpx.Response:
        """Follows redirects, without the API key: only the Conveyor server may get the key."""
        response = self._http.send(request, stream=True)
        for _ in range(REDIRECTS_MAX):
            if response.next_request is None:
                break
            response.close()
            response.next_request.headers.pop("X-API-Key", None)
            response = self._http.send(response.next_request, stream=True)
        return response

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(self.base_url, str(error) or type(error).__name__)


def check_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"{text!r} is not the address of a server, like http://127.0.0.1:8080")
    return str(url).rstrip("/").removesuffix("/v1")


def check_key(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("an API key is printable ASCII characters, without spaces around them")
    return text


def is_loopback(url: str) -> bool:
    """Whether the URL names this machine, which no proxy of the environment can reach."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
