"""A world to call the API in: the memory engine, a client that checks every answer it gets, and
a way to bring tasks to their ends without any worker."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry
from quart.testing.utils import sentinel
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers

from conveyor.api.server.app import make_app
from conveyor.api.server.auth import Passthrough
from conveyor.domain.changes import Applied, RunKey
from conveyor.domain.errors import make_problem
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import FailureReason, Run, Task, TaskRef, Webhook
from conveyor.domain.queries import TasksOf
from conveyor.domain.run.settlement import Claimed
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.memory import MemoryEngine, memory_engine
from conveyor.engines.system import AesSecretBox
from conveyor.ports.blobs import Blobs
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.gateway import NotScraped, Scraped
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, Unresolved
from conveyor.telemetry import Metrics, make_metrics
from conveyor.usecases.context import Context, RuntimeConfig
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.run import runs, tasks
from tests.api import contract
from tests.builders import ManualClock

ANNA = "anna-key"
BERT = "bert-key"
SECRET = b"s" * 32


class SilentSignals:
    """A world without workers: signals go nowhere, and there is nothing to tear down."""

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None: ...

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None: ...

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        return TeardownResult()


@dataclass(slots=True)
class ScriptedReceiver:
    """Every receiver there is: found and answering as the test has it, and remembering."""

    outcome: Delivered | NotDelivered = Delivered(204)  # noqa: RUF009 (a frozen value)
    unresolved: Unresolved | None = None
    heard: list[Message] = field(default_factory=list)

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        return self.unresolved

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        self.heard.append(message)
        return self.outcome


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer as a client sees it."""

    status: int
    headers: Headers
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        code: str = self.json["code"]
        return code


@dataclass(slots=True)
class World:
    env: Context
    engine: MemoryEngine
    clock: ManualClock
    metrics: Metrics
    app: QuartTrio
    receiver: ScriptedReceiver
    is_ready: list[bool] = field(default_factory=lambda: [True])

    def seen_through(self, env: Context) -> World:
        """The same world, served by a process that sees it otherwise."""
        app = make_app(
            env,
            Passthrough(SECRET),
            notifier=self.receiver,
            metrics=make_metrics(CollectorRegistry()),
            ready=lambda: self.is_ready[0],
        )
        return replace(self, app=app)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        key: str | None = ANNA,
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
    ) -> Seen:
        """One request. Every answer is held against what holds for all of them."""
        sent = Headers(headers or {})
        if key is not None and "X-API-Key" not in sent:
            sent["X-API-Key"] = key
        data = raw if raw is not None else (b"" if body is None else json.dumps(body).encode())
        if data and "Content-Type" not in sent:
            sent["Content-Type"] = "application/json"
        if sent.get("Content-Type") == "":
            del sent["Content-Type"]
        client = self.app.test_client(use_cookies=False)
        response = await client.open(
            path,
            method=method,
            headers=sent,
            data=data or None,
            json=sentinel,
            scope_base={"raw_path": path.partition("?")[0].encode()},
        )
        seen = Seen(response.status_code, response.headers, await response.get_data(as_text=False))
        _check(method, path, seen)
        return seen

    async def get(self, path: str, **options: Any) -> Seen:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Seen:
        return await self.call("POST", path, body, **options)

    async def submit(self, count: int = 1, *, key: str = ANNA, **fields: Any) -> Any:
        """Submits a job of so many lines and answers with the response."""
        lines = [{"url": f"https://example.com/{index}"} for index in range(count)]
        seen = await self.post("/v1/jobs", {"tasks": lines, **fields}, key=key)
        assert seen.status in {201, 202}, seen.body
        return seen.json

    async def tasks_of(self, job_id: str, run_id: str) -> list[Task]:
        run = await self.run(job_id, run_id)
        query = TasksOf(
            job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=10_000
        )
        return sorted(await self.env.store.find(query), key=lambda task: task.index)

    async def run(self, job_id: str, run_id: str) -> Run:
        run = await self.env.store.read(RunKey(JobId(job_id), RunId(run_id)))
        assert run is not None
        return run

    async def claim(self, job_id: str, task: Task) -> tuple[TaskRef, Task]:
        ref = TaskRef(JobId(job_id), task.run_id, task.task_id, task.shard)
        claimed = (await tasks.claim(self.env, [ref]))[0]
        assert isinstance(claimed, Claimed)
        return ref, claimed.task

    async def succeed(
        self, job_id: str, task: Task, body: bytes = b"<p>", content_type: str = "text/html"
    ) -> None:
        """Brings a task to a good end, as a worker would."""
        ref, held = await self.claim(job_id, task)
        page = Scraped(
            status=200, content_type=content_type, body=body, credits=1, cost_micros=2500
        )
        result = await tasks.store_body(self.env, ref, Claimed(held), page)
        verdict = await self.env.commit(
            tasks.judge_success(self.env, ref, held, page, result).change
        )
        assert isinstance(verdict, Applied)
        await runs.complete_if_done(self.env, ref.job_id, ref.run_id)

    async def fail(self, job_id: str, task: Task, detail: str = "404 from there") -> None:
        """Brings a task to a bad end."""
        ref, held = await self.claim(job_id, task)
        problem = make_problem("target_not_found", "The page does not exist", 404, detail)
        miss = NotScraped(reason=FailureReason.BAD_TARGET, problem=problem, retryable=False)
        job = await load_owned_job(self.env, (await self.run(job_id, task.run_id)).caller, job_id)
        verdict = await self.env.commit(tasks.judge_failure(self.env, job, ref, held, miss).change)
        assert isinstance(verdict, Applied)
        await runs.complete_if_done(self.env, ref.job_id, ref.run_id)

    async def finish(self, submitted: Any) -> list[Task]:
        """Ends every task of a submitted job's run well."""
        rows = await self.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
        for task in rows:
            await self.succeed(submitted["job_id"], task)
        return rows


def _check(method: str, path: str, seen: Seen) -> None:
    assert seen.headers.get("X-Request-ID"), "no request id"
    assert seen.headers["X-Content-Type-Options"] == "nosniff"
    media_type = seen.headers.get("Content-Type", "").partition(";")[0]
    is_json = media_type in {"application/json", "application/problem+json"}
    if seen.status >= 400:
        assert media_type == "application/problem+json", (seen.status, media_type)
    is_ours = "dry_run=true" in path  # The contract knows of no dry runs.
    if method != "HEAD" and is_json and not path.partition("?")[0].endswith("/content"):
        if is_ours and seen.status < 400:
            return
        contract.check(method, path.partition("?")[0], seen.status, media_type, seen.json)


def make_world(*, blobs: Blobs | None = None, **config: Any) -> World:
    clock = ManualClock()
    random = Random(7)
    engine = memory_engine(clock=clock, random=random)
    env = Context(
        store=engine.store,
        queue=engine.queue,
        blobs=blobs or engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
        secret_box=AesSecretBox(SECRET),
        signals=SilentSignals(),
        random=random,
        process_id="test",
        config=RuntimeConfig(**{"targets": TargetPolicy(), **config}),
    )
    metrics = make_metrics(CollectorRegistry())
    is_ready = [True]
    receiver = ScriptedReceiver()
    app = make_app(
        env,
        Passthrough(SECRET),
        notifier=receiver,
        metrics=metrics,
        ready=lambda: is_ready[0],
    )
    return World(env, engine, clock, metrics, app, receiver, is_ready)
