"""A client: one caller of the API, its requests to any serving API process, and the jobs that it
knows (docs/api.md).

A client repeats a request that got no answer, with the same key, as the SDK does; sometimes it also
repeats one that was answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import trio

from conveyor.simulation.client_history import AcceptedRequest, Call
from conveyor.simulation.context import SimContext
from conveyor.simulation.environment.http_exchange import Exchange
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.process import Process
from conveyor.simulation.secret_markers import secret_of

# How long a client waits for an answer before it disconnects.
TIMEOUT_S = 70.0
# A client tries about two minutes, longer than a claim on a key lasts (90 s).
TRIES_MAX = 8
RETRY_S_MAX = 30.0
# The share of lists that contain secrets.
SECRETS_SHARE = 0.2
# The share of lists that contain duplicates.
DUPLICATES_SHARE = 0.15

# Responses that ask the client to try again.
_TRY_AGAIN = frozenset({408, 429, 500, 503, 507})


@dataclass(slots=True)
class KnownJob:
    """A job that the client has seen. What the client believes about it may be out of date."""

    job_id: str
    is_open: bool = False
    is_scheduled: bool = False
    is_deleted: bool = False
    has_webhook: bool = False
    has_budget: bool = False


@dataclass(slots=True)
class Client:
    """One caller. Secrets and duplicates have random streams of their own, so that they do not
    change which actions are drawn."""

    name: str
    sim: SimContext
    random: Random = field(init=False)
    secrets_random: Random = field(init=False)
    duplicates_random: Random = field(init=False)
    jobs: list[KnownJob] = field(default_factory=list)
    inputs: list[tuple[str, str, bool]] = field(default_factory=list)
    exports: list[tuple[str, str, str]] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)
    has_signing_key: bool = False
    last_event: str | None = None
    numbers: int = 0

    def __post_init__(self) -> None:
        self.random = self.sim.random(self.name)
        self.secrets_random = self.sim.random(f"secrets of {self.name}")
        self.duplicates_random = self.sim.random(f"repeats of {self.name}")

    def secret(self, what: str) -> str:
        return secret_of(self.name, what)

    def sends_secrets(self) -> bool:
        """Whether the next list contains secrets."""
        return self.secrets_random.random() < SECRETS_SHARE

    def sends_duplicates(self) -> bool:
        """Whether the next list contains duplicates, which must be fetched only once."""
        return self.duplicates_random.random() < DUPLICATES_SHARE

    def new_key(self) -> str:
        self.numbers += 1
        return f"{self.name}-{self.numbers}"

    def pick(self, fits: Callable[[KnownJob], bool] = lambda job: True) -> KnownJob | None:
        """One of the newest jobs that the client has not deleted and that fits; new jobs have the
        most activity."""
        fitting = [job for job in self.jobs if not job.is_deleted and fits(job)]
        return self.random.choice(fitting[-6:]) if fitting else None

    async def post(self, path: str, body: Any = None) -> Call | None:
        """Sends a POST with a new key until it gets a final answer; returns None if it never
        does."""
        key = self.new_key()
        if self.keys and self.sim.faults.occurs(Fault.CLIENT_REUSED_KEY):
            await self._reuse_a_key(body)
        self.keys.append((key, path))
        return await self.reliably("POST", path, body, key=key)

    async def get(self, path: str) -> Call | None:
        return await self.reliably("GET", path)

    async def reliably(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        raw: bytes | None = None,
    ) -> Call | None:
        """Sends a request until its answer is final, and sometimes once more."""
        data = raw if raw is not None else (b"" if body is None else json.dumps(body).encode())
        send = partial(self._send, method, path, data, key, is_raw=raw is not None)
        if key is not None and self.sim.faults.occurs(Fault.CLIENT_REPEATED_AT_ONCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                nursery.start_soon(send)
        for _ in range(TRIES_MAX):
            call = await send()
            if call.status is not None and not _asks_to_try_again(call):
                if key is not None and self.sim.faults.occurs(Fault.CLIENT_REPEATED):
                    await send()
                return call
            await trio.sleep(self.random.uniform(0.5, RETRY_S_MAX))
        return None

    async def put_into_storage(self, url: str, body: bytes) -> None:
        """Uploads to a presigned URL of the storage, not through the API."""
        await trio.sleep(self.random.uniform(0.0, 2.0))
        status = self.sim.backend.handle_presigned("PUT", url, {"content-type": "text/plain"}, body)
        self.sim.history.uploads.append((url, body))
        self.sim.trace.note(self.name, "uploaded", f"{len(body)} bytes -> {status}")

    async def once(self, method: str, path: str, body: Any = None) -> Call:
        """Sends a request once and returns whatever comes of it."""
        return await self._send(
            method, path, b"" if body is None else json.dumps(body).encode(), None, is_raw=False
        )

    async def send_json(self, method: str, path: str, text: bytes) -> Call:
        """Sends a request once, with this text as its body, which may be no valid JSON."""
        return await self._send(method, path, text, self.new_key(), is_raw=False)

    async def send_again(self, call: Call) -> Call:
        """Sends a request once more: its own or that of another client."""
        return await self._send(call.method, call.path, call.body, call.key, is_raw=False)

    async def _reuse_a_key(self, body: Any) -> None:
        """Sends another request with a key that was used before, as a careless client does."""
        key, path = self.random.choice(self.keys)
        other = json.dumps({"tasks": [{"url": "https://site.example/other"}], "name": key})
        await self._send("POST", path, other.encode(), key, is_raw=False)

    async def _send(
        self, method: str, path: str, body: bytes, key: str | None, *, is_raw: bool
    ) -> Call:
        headers = {"x-api-key": self.secret("key")}
        if key is not None:
            headers["idempotency-key"] = key
        if body:
            headers["content-type"] = "text/plain" if is_raw else "application/json"
        call = self._new_call(method, path, key, body)
        exchange = Exchange(method=method, path=path, headers=headers, body=body)
        process = self._some_api()
        if process is not None and process.accept(exchange):
            await self._wait_for(exchange)
        else:
            await trio.sleep(0.1)
        if exchange.is_whole:
            call.status, call.answer = exchange.status, bytes(exchange.answer)
            call.answered_at, call.media_type = trio.current_time(), exchange.media_type
            self.sim.monitor.on_answer(call)
        answer = "no answer" if call.status is None else f"{call.status} {_short(call.answer)}"
        self.sim.trace.note(self.name, "was answered", f"#{call.number} {answer}")
        return call

    def _new_call(self, method: str, path: str, key: str | None, body: bytes) -> Call:
        history = self.sim.history
        call = Call(
            number=len(history.calls),
            tenant=self.name,
            method=method,
            path=path,
            key=key,
            body=body,
            sent_at=trio.current_time(),
        )
        history.calls.append(call)
        asks = f"#{call.number} {path} key={key} {_short(body)}"
        self.sim.trace.note(self.name, method, asks)
        return call

    async def _wait_for(self, exchange: Exchange) -> None:
        patience_s = TIMEOUT_S
        if self.sim.faults.occurs(Fault.CLIENT_HUNG_UP):
            patience_s = self.random.uniform(0.0, 0.5)
        with trio.move_on_after(patience_s):
            await exchange.is_over.wait()
        if not exchange.is_over.is_set():
            exchange.hung_up.set()

    def _some_api(self) -> Process | None:
        serving = [process for process in self.sim.processes if process.is_serving]
        return self.random.choice(serving) if serving else None

    def record_accepted(self, call: Call, *, is_open: bool, is_scheduled: bool = False) -> KnownJob:
        """Records an accepted job in the history, so that checkers hold the program to it."""
        answer: Mapping[str, Any] = call.json
        job_id = answer["job_id"]
        known = KnownJob(job_id, is_open, is_scheduled)
        self.jobs.append(known)
        latest = answer.get("latest_run")
        self.sim.history.accepted_requests[job_id] = AcceptedRequest(
            tenant=self.name,
            job_id=job_id,
            run_id=latest["run_id"] if latest else None,
            lines_count=answer["accepted_tasks"],
            is_open=is_open,
            is_scheduled=is_scheduled,
        )
        return known


def _asks_to_try_again(call: Call) -> bool:
    if call.status == 409:
        return b"idempotency_in_progress" in call.answer or b'"conflict"' in call.answer
    return call.status in _TRY_AGAIN


def _short(body: bytes) -> str:
    return body[:160].decode(errors="replace").replace("\n", " ")
