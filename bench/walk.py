"""Lists the modules and functions that one task executes, from POST to its result and webhook.

The bench runs one job of one URL, with a webhook and an Idempotency-Key, on the embedded engine and
on the AWS engine with Redis, over the models of their services. The API, the scraped site and the
receiver of the webhook use real sockets; the site, the receiver and the client are not traced.

The walk records each function in conveyor/ and actors/ that is called or resumed from the moment
the client sends the POST until the webhook is delivered, the results and the body are read, and the
service is idle. A file counts once, a function once. Not recorded: the simulator, which contains
the models; bodies of modules and classes, which run at import; and the actors in BACKGROUND, which
poll whether there is a task or not. Everything else is recorded, even if the service would have
done it without the task.

Functions are listed in the order of their first call in each step. Steps overlap: a worker may
fetch a page before the response to its POST is written. `_steps` defines where each step starts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import random
import tempfile
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

import trio
import trio.testing
from prometheus_client import CollectorRegistry

from actors.completion_notifier import CompletionNotifier
from actors.crawler import Crawler
from actors.exporter import Exporter
from actors.ingest_streamer import IngestStreamer
from actors.lease_heartbeater import LeaseHeartbeater
from actors.limiters.fair_limiter import FairLimiter
from actors.poller.poller import RunPoller
from actors.queue_discovery import QueueDiscovery
from actors.reconcile_sweeper import ReconcileSweeper
from actors.runtime import Child
from actors.scheduler import Scheduler
from actors.shard_writer import ShardWriter
from actors.status_reporter import StatusReporter
from actors.task_runner import TaskRunner
from actors.tree import LocalSignals, single_writer_mailboxes
from bench.call_trace import BY_REQUEST, IGNORED, CallTrace, code_of
from conveyor.api.server.server import HttpServer
from conveyor.bootstrap.aws import names_of, open_on
from conveyor.bootstrap.runtime import AWS, Runtime, make_env, open_runtime
from conveyor.config import Settings
from conveyor.domain import ids
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.control_queue import listen_forever
from conveyor.engines.aws.engine import build_engine, check_resources
from conveyor.engines.executor import COMPUTE_THREADS_MAX, ThreadExecutor
from conveyor.engines.http.direct import DirectGateway
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.engines.redis.fallback_coordinator import FallbackCoordinator
from conveyor.engines.system import SystemClock
from conveyor.gateway.content import open_processor
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.http_server.connection import Listener
from conveyor.simulation.models import AwsModel, FaultSource, RedisModel
from conveyor.telemetry import make_metrics
from conveyor.usecases.run import runs, tasks

SUBMIT, RESULTS, CONTENT = "submit", "read results", "read content"
STEPS = (
    SUBMIT,
    "dispatch",
    "fetch",
    "store",
    "settle",
    "complete",
    "webhook",
    RESULTS,
    CONTENT,
)

# Actors that serve crawls, schedules, exports, long lists, repairs, status reports, notifications
# and the return of Redis. One task needs none of them, but their polls may happen during a walk.
BACKGROUND = (
    Crawler.run,
    Scheduler.run,
    Exporter.run,
    IngestStreamer.run,
    ReconcileSweeper.run,
    StatusReporter.run,
    listen_forever,
    FallbackCoordinator.reconnect_forever,
)

PAGE = b"<h1>A page</h1>"
# On AWS a settle waits up to 2 s for others, and the notifier polls for notices every 5 s.
WEBHOOK_TIMEOUT_S = 60.0
# Longer than any pause within a step, and shorter than the period of any polling actor.
QUIET_S = 0.2


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench walk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, _site() as site:
        traces = {
            "embedded": _walk(site, lambda: _open_embedded(Path(folder))),
            "aws": _walk(site, _open_aws),
        }
    for name, trace in traces.items():
        _show(name, trace)
    for name, trace in traces.items():
        print(f"{name}: {len(trace.files)} files, {len(trace.functions)} functions")
    if options.json:
        counts = {f"{name}_files": len(trace.files) for name, trace in traces.items()}
        print(json.dumps(counts))


def _steps() -> Mapping[CodeType, str]:
    """Maps the function that starts a step to the step. A request belongs to the client's step."""
    starts: dict[Callable[..., object], str] = {
        Listener.serve: BY_REQUEST,
        QueueDiscovery.run: "dispatch",
        RunPoller.run: "dispatch",
        TaskRunner.run: "fetch",
        LeaseHeartbeater.run: "fetch",
        tasks.store_body: "store",
        ShardWriter.run: "settle",
        runs.complete_if_done: "complete",
        CompletionNotifier.run: "webhook",
        **dict.fromkeys(BACKGROUND, IGNORED),
    }
    return {code_of(function): step for function, step in starts.items()}


def _walk(site: Site, open_world: Callable[[], AbstractAsyncContextManager[Runtime]]) -> CallTrace:
    trace = CallTrace(_steps())
    with trace.installing():
        trio.run(_follow, trace, site, open_world)
    missing = [step for step in STEPS if not any(trace.lines(step))]
    assert not missing, f"nothing was called in {missing}: see _steps"
    return trace


async def _follow(
    trace: CallTrace,
    site: Site,
    open_world: Callable[[], AbstractAsyncContextManager[Runtime]],
) -> None:
    async with open_world() as world, _serving(world) as url:
        await trio.testing.wait_all_tasks_blocked(QUIET_S)
        await trio.to_thread.run_sync(_run_client, trace, site, url)
        # The delivery of the webhook is still to be recorded, and the run's poller to end.
        await trio.testing.wait_all_tasks_blocked(QUIET_S)
        trace.end()


@asynccontextmanager
async def _serving(world: Runtime) -> AsyncGenerator[str, None]:
    """Runs API and worker in one process, as `conveyor dev` does."""
    urls: list[str] = []
    server = HttpServer(
        make_app=lambda ready: world.app(ready=ready),
        host="127.0.0.1",
        port=0,
        on_listening=urls.append,
    )
    service = world.service(Child("http_server", run=server.run, reports_ready=True))
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        yield urls[0]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _open_embedded(data_dir: Path) -> AsyncGenerator[Runtime, None]:
    settings = Settings(data_dir=data_dir, allow_private_targets=True)
    async with open_runtime(settings, role="dev") as world:
        yield world


@asynccontextmanager
async def _open_aws() -> AsyncGenerator[Runtime, None]:
    """Assembles the service as the composition root does, with models in place of AWS and Redis."""
    settings = Settings(
        engine=AWS,
        table="walk",
        bucket="walk",
        secret_key="known to all",
        redis_url="redis://model",
        allow_private_targets=True,
    )
    clock, draw, mail = SystemClock(), random.Random(1), single_writer_mailboxes()
    fault_source = FaultSource(random=draw)
    model, redis = (
        AwsModel(clock=clock, fault_source=fault_source),
        RedisModel(clock=clock, fault_source=fault_source),
    )
    client, names = RetryingAwsClient(transport=model, random=draw), names_of(settings)
    await check_resources(client, names, region="us-east-1")
    engine = await build_engine(client, model, names, clock=clock, random=draw)
    owner = ids.mint_ulid(clock.now(), draw)
    local = LocalSignals(mail.discovery.address, mail.streamer.address)
    async with open_on(
        settings, engine, redis.link(), random=draw, owner=owner, local=local
    ) as shared:
        env = make_env(settings, shared, clock, draw, mail, ThreadExecutor(COMPUTE_THREADS_MAX))
        env = replace(
            env,
            process_id=owner,
            signals=shared.signals,
            workflows=shared.workflows,
            cache=shared.cache,
            is_apart=shared.is_away,
        )
        with (
            _pool() as pages,
            _pool() as webhooks,
            open_processor(env.executor) as processor,
        ):
            yield Runtime(
                settings=settings,
                env=env,
                mail=mail,
                gateway=DirectGateway(pages, now=env.now, processor=processor),
                notifier=WebhookNotifier(webhooks, now=env.now),
                limiter=FairLimiter(capacity=settings.concurrency),
                metrics=make_metrics(CollectorRegistry()),
                listeners=shared.listeners,
                meter=shared.meter,
            )


def _pool() -> closing[HttpPool]:
    pool = HttpPool(
        TargetPolicy(allow_private=True), PoolLimits(), executor=ThreadExecutor(COMPUTE_THREADS_MAX)
    )
    return closing(pool)


@dataclass(slots=True)
class Site:
    """The scraped site and the receiver of webhooks."""

    url: str
    webhook_received: threading.Event = field(default_factory=threading.Event)


@contextmanager
def _site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        # Buffered, so that a response arrives in one piece: the client's path would vary otherwise.
        wbufsize = -1

        def do_GET(self) -> None:
            self._answer(200, PAGE)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, b"")
            site.webhook_received.set()

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site = Site(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


def _run_client(trace: CallTrace, site: Site, url: str) -> None:
    site.webhook_received.clear()
    job = {"tasks": [{"url": f"{site.url}/page"}], "webhook": {"url": f"{site.url}/hook"}}
    trace.begin(SUBMIT)
    submitted = json.loads(_call(url, "POST", "/v1/jobs", job))
    assert site.webhook_received.wait(WEBHOOK_TIMEOUT_S), "the webhook did not submit_short_lists"
    path = f"/v1/jobs/{submitted['job_id']}"
    trace.begin(RESULTS)
    (result,) = json.loads(_call(url, "GET", f"{path}/results"))["results"]
    trace.begin(CONTENT)
    assert _call(url, "GET", f"{path}/tasks/{result['task_id']}/content") == PAGE


def _call(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
    headers = {"X-API-Key": "walk", "Connection": "close"}
    if body is not None:
        headers |= {"Content-Type": "application/json", "Idempotency-Key": "one-task"}
    with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        content = response.read()
    assert response.status < 300, f"{method} {path}: {response.status} {content.decode()}"
    return content


def _show(name: str, trace: CallTrace) -> None:
    print(f"{name}\n")
    for step in STEPS:
        print(f"  {step}")
        for file, functions in trace.lines(step):
            line = f"{file.removesuffix('.py')}: {', '.join(functions)}"
            print(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="      "))
        print()
