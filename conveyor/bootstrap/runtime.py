"""The composition root: the one place that knows which engine runs (docs/architecture.md, Layers).

Each role of a process is a function here. An import opens nothing. Everything that is opened is
closed in reverse order.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio
from prometheus_client import CollectorRegistry, ProcessCollector

from actors.child_process import STOP_S, WorkerProcess
from actors.limiters.fair_limiter import FairLimiter, slots_count
from actors.poller.poller import WATCH_S
from actors.runtime import Child, Intensity, Strategy, Supervisor, nest, tree
from actors.tree import (
    LocalSignals,
    Mailboxes,
    actor_figures,
    helper_tree,
    make_limiter,
    single_writer_mailboxes,
    worker_tree,
)
from conveyor import __version__
from conveyor.api.server.auth import Authenticator, KeyList, Origins, Passthrough, WatchedKeys
from conveyor.bootstrap.body_memory import body_limits
from conveyor.bootstrap.local_gateway import add_renderer, find_support
from conveyor.config import BadSettings, KeyFile, Settings, environ_of, load_otlp_settings
from conveyor.domain import ids, limits
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.executor import COMPUTE_THREADS_MAX, ThreadExecutor
from conveyor.engines.http.direct import DirectGateway
from conveyor.engines.http.export_sink import HttpExportSink
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.engines.http.zenrows import ZenrowsGateway, has_key
from conveyor.engines.sqlite import join_engine, open_engine
from conveyor.engines.system import (
    AesSecretBox,
    SystemClock,
    check_secret,
    load_or_create_secret,
    refuse_lost_secret,
    secret_of,
)
from conveyor.gateway.content import open_processor
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from conveyor.ports.executor import Executor
from conveyor.ports.gateway import Gateway
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.telemetry import EngineUsage, Metered, Metrics, make_metrics
from conveyor.usecases import clock_repairs
from conveyor.usecases.context import BatchingConfig, Context, PollIntervals, RuntimeConfig

if TYPE_CHECKING:
    from quart_trio import QuartTrio

DIRECT = "direct"
# Addresses that only this machine can reach.
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
AWS = "aws"
POSTGRES = "postgres"
#: Engines on which many processes work, and which no process owns.
SHARED_ENGINES = frozenset({AWS, POSTGRES})
# On AWS every query is billed, and every worker of a fleet makes it. Longer intervals than on the
# embedded engine delay webhooks, schedules and exports by up to these seconds.
AWS_POLL_INTERVALS = PollIntervals(
    notices_s=5.0, schedules_s=5.0, exports_s=5.0, crawls_s=1.0, deletions_s=30.0, sweeps_s=30.0
)

log = logging.getLogger(__name__)

# How long a worker that has noticed a stop usually takes to end its fetches. It is added to WATCH_S
# to estimate when an unreachable worker has stopped.
_ENDING_S = 1.0

# M_MMAP_THRESHOLD in glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
# Larger than most pages (20 KB), so that they need no system call each; far smaller than the
# largest body (25 MiB).
_LARGE_BLOCK_BYTES = 256 * 1024


class Engine(Protocol):
    @property
    def store(self) -> Store: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def blobs(self) -> Blobs: ...
    @property
    def coordinator(self) -> Coordinator: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """An open engine with everything around it; no actor runs yet.

    `listeners` pass messages of other processes on to the worker. `meter` counts the calls to a
    shared engine. The process reports that it is ready only while `is_sound` returns True.
    """

    settings: Settings
    env: Context
    mail: Mailboxes
    gateway: Gateway
    notifier: WebhookSender
    limiter: FairLimiter
    metrics: Metrics
    listeners: Sequence[Child] = ()
    meter: Metered | None = None
    is_sound: Callable[[], bool] = lambda: True

    def authenticator(self) -> Authenticator:
        return make_authenticator(self.settings, _secret(self.settings))

    def origins(self) -> Origins:
        """The rules by which the server finds out its public URL and the client's address
        (docs/operations.md, Behind a proxy)."""
        return Origins(public_url=self.settings.public_url, proxies=self.settings.trusted_proxies)

    def app(
        self,
        *,
        ready: Callable[[], bool],
        supervisor: Callable[[], Supervisor] | None = None,
        is_dev: bool = False,
    ) -> QuartTrio:
        """Builds the API with its dashboard. `supervisor` returns the tree that operators see."""
        # Imported here, because only a server needs the web framework, and its import is most of
        # the start time.
        from conveyor.api.server.app import make_app
        from conveyor.ui.access import AccessRules
        from conveyor.ui.dashboard import Dashboard
        from conveyor.ui.system import SystemView

        settings = self.settings
        is_local = settings.host in LOOPBACK and settings.public_url is None
        dashboard = Dashboard(
            rules=AccessRules(
                admin_key=settings.admin_key,
                viewer_key=settings.viewer_key,
                is_open_on_loopback=is_dev and is_local and settings.auth == "passthrough",
            ),
            origins=self.origins(),
            system=SystemView(
                engine=settings.engine,
                tree=None if supervisor is None else lambda: tree(supervisor()),
            ),
        )
        return make_app(
            self.env,
            self.authenticator(),
            notifier=self.notifier,
            metrics=self.metrics,
            ready=lambda: ready() and self.is_sound(),
            origins=self.origins(),
            mount=dashboard.mount,
        )

    async def drain(self) -> None:
        """Starts no more work, and gives running work `drain_s` to end and settle."""
        with trio.move_on_after(self.settings.drain_s):
            await self.limiter.drain()

    def helper(self) -> Supervisor:
        helper = helper_tree(
            self.env,
            self.mail,
            gateway=self.gateway,
            limiter=self.limiter,
            metrics=self.metrics,
        )
        return self.watched(helper)

    def watched(self, supervisor: Supervisor) -> Supervisor:
        """Lets each scrape read the figures of the actors under this supervisor."""
        self.metrics.actors.watch(lambda: actor_figures(supervisor))
        return supervisor

    def helper_processes(self, count: int) -> list[Child]:
        """Builds the children that run further processes on this data. The loss of one restarts
        nothing else."""
        if count == 0:
            return []
        helper = WorkerProcess(
            # -P: without it, Python searches the working directory for modules first, and would run
            # a file there that has the name of a module.
            command=(sys.executable, "-P", "-m", "conveyor.cli.main", "worker"),
            environ=environ_of(self.settings),
        )
        children = [
            Child(
                f"worker_process_{number}",
                run=helper.run,
                # Instead of the default of 5 restarts within 60 s: a process can also be killed
                # from outside, and the others continue meanwhile.
                intensity=Intensity(restarts_max=20, within_s=300.0),
                # The clean-up of WorkerProcess takes up to STOP_S; a shorter grace would mark it as
                # overdue.
                stop_grace_s=STOP_S + 1.0,
            )
            for number in range(1, count + 1)
        ]
        return [nest(Supervisor("processes", strategy=Strategy.ONE_FOR_ONE, children=children))]

    def service(self, *also: Child) -> Supervisor:
        """A worker with other children beside it, such as an API server, which its restarts do not
        affect: they use only its mailboxes, which outlive its actors. If the worker gives up, all
        of them end."""
        # No restart at this level: a worker that has used up its own restarts ends the process.
        worker = nest(self.worker(), intensity=Intensity(restarts_max=0))
        return self.watched(
            Supervisor("service", strategy=Strategy.ONE_FOR_ONE, children=[worker, *also])
        )

    def worker(self, *also: Child) -> Supervisor:
        worker = worker_tree(
            self.env,
            self.mail,
            gateway=self.gateway,
            notifier=self.notifier,
            limiter=self.limiter,
            metrics=self.metrics,
            also=(*self.listeners, *also),
        )
        return self.watched(worker)


@asynccontextmanager
async def open_runtime(settings: Settings, *, role: str) -> AsyncGenerator[Runtime, None]:
    """Opens the engine that the settings name. This process owns an embedded engine, and is one of
    many on a shared engine."""
    async with _open_world(settings, role) as world, _exporting(world) as exporting:
        yield exporting


@asynccontextmanager
async def _exporting(world: Runtime) -> AsyncGenerator[Runtime, None]:
    """Exports traces and metrics over OTLP, if the environment has an endpoint."""
    otlp = load_otlp_settings()
    if not otlp.signals:
        yield world
        return
    # Imported here: the packages are optional, and their import takes longer than our own.
    try:
        from conveyor.engines.otel import open_otel
    except ModuleNotFoundError as error:
        raise BadSettings(
            f"an OTLP endpoint needs {error.name}: pip install 'conveyor[otel]', or unset "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from None
    async with open_otel(
        world.metrics.registry,
        otlp.signals,
        now=world.env.now,
        instance=world.env.process_id,
        interval_s=otlp.interval_s,
    ) as tracer:
        yield replace(world, env=replace(world.env, tracer=tracer))


@asynccontextmanager
async def _open_world(settings: Settings, role: str) -> AsyncGenerator[Runtime, None]:
    # Before anything is opened: a process that must not run must not touch the data.
    require_assertions()
    tune_memory()
    clock, randomness = SystemClock(), random.SystemRandom()
    if settings.engine in SHARED_ENGINES:
        open_world = _open_aws_world if settings.engine == AWS else _open_postgres_world
        async with open_world(settings, clock, randomness, role) as world:
            yield world
        return
    async with open_engine(settings.data_dir, clock=clock, random=randomness, owner=role) as engine:
        with build_runtime(settings, engine, clock, randomness, Mailboxes()) as world:
            # Before any request: a wrong secret could not unseal what is stored, and would seal new
            # data with a second one.
            check_secret(settings.data_dir, world.env.secret_box)
            await _learn_newest_ids(world.env)
            yield replace(world, is_sound=engine.health.is_sound)


@asynccontextmanager
async def _open_aws_world(
    settings: Settings, clock: Clock, randomness: random.Random, role: str
) -> AsyncGenerator[Runtime, None]:
    with require_extra(settings):
        if settings.has_task_store:
            from conveyor.bootstrap.two_stores import open_two_stores as open_shared
        else:
            from conveyor.bootstrap.aws import open_shared

    mail, owner = single_writer_mailboxes(), ids.mint_ulid(clock.now(), randomness)
    async with open_shared(
        settings,
        clock=clock,
        random=randomness,
        owner=owner,
        local=LocalSignals(mail.discovery.address, mail.streamer.address),
    ) as shared:
        # An API process has no worker, so its signals go to other processes.
        signals = replace(shared.signals, local=None) if role == "api" else shared.signals
        with build_runtime(settings, shared, clock, randomness, mail) as world:
            await shared.secret.check(world.env.secret_box)
            world.metrics.coordinator_away.set_function(shared.is_away)
            cache_outcomes = {} if shared.cache is None else shared.cache.outcomes
            world.metrics.registry.register(EngineUsage(shared.meter, cache_outcomes))
            env = replace(
                world.env,
                process_id=owner,
                signals=signals,
                workflows=shared.workflows,
                cache=shared.cache,
                is_apart=shared.is_away,
            )
            await _learn_newest_ids(env)
            yield replace(world, env=env, listeners=shared.listeners, meter=shared.meter)


@asynccontextmanager
async def _open_postgres_world(
    settings: Settings, clock: Clock, randomness: random.Random, role: str
) -> AsyncGenerator[Runtime, None]:
    with require_extra(settings):
        from conveyor.bootstrap.postgres import open_postgres_runtime

    mail, owner = single_writer_mailboxes(), ids.mint_ulid(clock.now(), randomness)
    async with open_postgres_runtime(
        settings,
        clock=clock,
        random=randomness,
        owner=owner,
        local=LocalSignals(mail.discovery.address, mail.streamer.address),
        # Of a deployment with several processes, `conveyor init` migrates first.
        migrates=role == "dev",
    ) as shared:
        # An API process has no worker, so its signals go to other processes.
        signals = replace(shared.signals, local=None) if role == "api" else shared.signals
        with build_runtime(settings, shared, clock, randomness, mail) as world:
            await shared.check_secret(world.env.secret_box)
            env = replace(world.env, process_id=owner, signals=signals)
            await _learn_newest_ids(env)
            yield replace(world, env=env, listeners=shared.listeners)


async def _learn_newest_ids(env: Context) -> None:
    """Reads the newest ids. If the engine is unavailable now, the process starts without them."""
    try:
        await clock_repairs.learn_newest_ids(env)
    except Unavailable as error:
        log.warning("newest ids not read", extra={"cause": str(error)})


async def create_resources(settings: Settings) -> Sequence[str]:
    """Creates what a shared engine lacks. Returns the names of all its resources."""
    clock, randomness = SystemClock(), random.SystemRandom()
    with require_extra(settings):
        if settings.engine == POSTGRES:
            from conveyor.bootstrap.postgres import create_postgres_resources as create
        elif settings.has_task_store:
            from conveyor.bootstrap.two_stores import create_two_stores as create
        else:
            from conveyor.bootstrap.aws import create_aws_resources as create

    return await create(settings, clock=clock, random=randomness)


@contextmanager
def require_extra(settings: Settings) -> Iterator[None]:
    """Turns a missing package into a message for the operator. A shared engine is imported only
    when it is used, because an embedded installation does not have its packages."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = "aws,postgres" if settings.has_task_store else settings.engine
        raise BadSettings(
            f"CONVEYOR_ENGINE={settings.engine} needs {error.name}: pip install 'conveyor[{extra}]'"
        ) from None


@asynccontextmanager
async def join_world(settings: Settings) -> AsyncGenerator[Runtime, None]:
    """Opens an embedded engine that another process owns."""
    require_assertions()
    tune_memory()
    clock, randomness = SystemClock(), random.SystemRandom()
    async with join_engine(settings.data_dir, clock=clock, random=randomness) as engine:
        with build_runtime(settings, engine, clock, randomness, Mailboxes()) as world:
            check_secret(settings.data_dir, world.env.secret_box)
            async with _exporting(world) as exporting:
                yield exporting


@contextmanager
def build_runtime(
    settings: Settings,
    engine: Engine,
    clock: Clock,
    randomness: random.Random,
    mail: Mailboxes,
) -> Iterator[Runtime]:
    """Builds everything around an engine."""
    env = make_env(settings, engine, clock, randomness, mail, ThreadExecutor(COMPUTE_THREADS_MAX))
    # Webhooks and exports have a pool of their own: scraping cannot use up its connections.
    with _pool(_targets(settings), PoolLimits()) as guarded, _gateway(settings, env) as gateway:
        env = replace(env, export_sink=HttpExportSink(guarded, now=env.now))
        yield Runtime(
            settings=settings,
            env=env,
            mail=mail,
            gateway=gateway,
            notifier=WebhookNotifier(guarded, now=env.now),
            limiter=make_limiter(settings.concurrency, env.config.pace),
            metrics=_process_metrics(settings, env),
        )


def make_authenticator(settings: Settings, secret: bytes) -> Authenticator:
    if settings.api_keys:
        return KeyList.of(settings.api_keys, secret=secret)
    if settings.auth == "keys":
        assert settings.api_keys_file is not None
        keys = KeyFile(settings.api_keys_file)
        return WatchedKeys(keys, secret=secret, now_s=trio.current_time)
    return Passthrough(secret)


def _process_metrics(settings: Settings, env: Context) -> Metrics:
    """Creates the metrics with those of the process itself: memory, descriptors, CPU, disk."""
    ProcessCollector(registry=(registry := CollectorRegistry()))
    metrics = make_metrics(registry)
    metrics.program.build_info.labels(__version__, env.config.build or "").set(1)
    folder = settings.postgres.blob_dir if settings.engine in SHARED_ENGINES else settings.data_dir
    if folder is not None:
        metrics.program.disk_free.set_function(lambda: shutil.disk_usage(folder).free)
        metrics.program.disk_size.set_function(lambda: shutil.disk_usage(folder).total)
    return metrics


def make_env(
    settings: Settings,
    engine: Engine,
    clock: Clock,
    randomness: random.Random,
    mail: Mailboxes,
    executor: Executor,
) -> Context:
    """Builds the context of the use cases on this engine."""
    targets = _targets(settings)
    is_aws = settings.engine == AWS
    return Context(
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
        secret_box=AesSecretBox(_secret(settings), nonce=randomness.randbytes),
        signals=LocalSignals(mail.discovery.address, mail.streamer.address),
        random=randomness,
        process_id=ids.mint_ulid(clock.now(), randomness),
        config=RuntimeConfig(
            sync_tasks_max=settings.sync_tasks_max,
            at_once_max=settings.at_once_max,
            shard_count=settings.shard_count,
            max_inflight=settings.max_inflight,
            targets=targets if settings.gateway_url == DIRECT else None,
            gateway=find_support(settings),
            has_gateway_key=has_key(settings.gateway_url),
            webhooks=targets,
            knows_costs=settings.gateway_url == DIRECT or settings.credit_micros is not None,
            body_days=settings.body_days,
            row_days=settings.row_days,
            build=settings.build,
            shares_runs=is_aws,
            measures_demand=settings.scaling is not None,
            quotas=settings.quotas,
            pace=_shared_pace(settings) if is_aws else BatchingConfig(),
            cadence=AWS_POLL_INTERVALS if is_aws else PollIntervals(),
            sample_tasks_min=limits.AWS_SAMPLE_TASKS if is_aws else 1,
            # Only with Redis can a worker lose the coordinator and still reach the store.
            unseen_s=0.0 if settings.redis_url is None else WATCH_S + _ENDING_S,
        ),
        executor=executor,
    )


def _shared_pace(settings: Settings) -> BatchingConfig:
    """Each call has a price on AWS, so batches wait longer. Pages wait for a pack and then for a
    group: with fewer places for them (`writing_share`) both would be sent too soon."""
    return BatchingConfig(
        counts_together=True,
        writing_share=3,
        settle_s=0.01 if settings.has_task_store else 1.0,
        settle_max=settings.shard_count * limits.INLINE_TASKS_MAX,
        receive_share=0.075,
    )


@contextmanager
def _gateway(settings: Settings, env: Context) -> Iterator[Gateway]:
    """Opens the gateway. The operator chooses the address of a remote one: it may be private."""
    is_direct = settings.gateway_url == DIRECT
    targets = _targets(settings) if is_direct else TargetPolicy(allow_private=True)
    with _pool(targets, _pool_limits(settings)) as pool, open_processor(env.executor) as processor:
        if is_direct:
            direct = DirectGateway(pool, now=env.now, processor=processor)
            with add_renderer(direct, settings, now=env.now) as gateway:
                yield gateway
        else:
            price = settings.credit_micros
            yield ZenrowsGateway(pool, settings.gateway_url, now=env.now, credit_micros=price)


@contextmanager
def _pool(targets: TargetPolicy, pool_limits: PoolLimits) -> Iterator[HttpPool]:
    pool = HttpPool(targets, pool_limits, executor=ThreadExecutor(COMPUTE_THREADS_MAX))
    try:
        yield pool
    finally:
        pool.close()


def _targets(settings: Settings) -> TargetPolicy:
    return TargetPolicy(allow_private=settings.allow_private_targets)


def _pool_limits(settings: Settings) -> PoolLimits:
    return msgspec.structs.replace(
        body_limits(settings),
        connections_max=2 * slots_count(settings.concurrency) + 64,
        # As many as there are slots, so that one caller cannot keep another from a site.
        connections_per_origin_max=slots_count(settings.concurrency),
        # A remote gateway may be silent for as long as a page takes.
        read_timeout_s=60.0 if settings.gateway_url == DIRECT else limits.SCRAPE_DEADLINE_S,
    )


def _secret(settings: Settings) -> bytes:
    if settings.secret_key is not None:
        return secret_of(settings.secret_key)
    # A new secret beside existing data could not unseal it, so a lost file is an error.
    refuse_lost_secret(settings.data_dir)
    path = settings.data_dir / "secret.key"
    try:
        return load_or_create_secret(path)
    except (OSError, ValueError) as error:
        raise BadSettings(
            f"the secret key cannot be read from or kept in {path} ({error}): put the file back as "
            "it was, or set CONVEYOR_SECRET_KEY"
        ) from None


def tune_memory() -> None:
    """Tunes the garbage collector and the C allocator for processes that run for weeks.

    Rows and messages are freed by reference counts. With its default thresholds the collector found
    almost nothing and cost 6 % of the CPU time of a page. Modules that are loaded by now are
    frozen, so that a full collection, which frees the cycles of failed requests, is cheap.
    """
    gc.freeze()  # After the imports of the caller: later objects are not exempt.
    gc.set_threshold(50_000, 20, 10)
    _keep_large_blocks_apart()


def _keep_large_blocks_apart() -> None:
    """Makes glibc return freed bodies to the system.

    By default glibc raises its mmap threshold to the size of the largest freed block, so bodies lie
    in the heap between small blocks that stay. Under a mixed load the resident memory grew by 2 MB
    a minute. With a fixed threshold each large block has its own pages. Other C libraries have no
    `mallopt`, or ignore it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def require_assertions() -> None:
    """Refuses to run under python -O, which disables the assertions that guard the invariants."""
    if not __debug__:
        raise BadSettings("Conveyor does not run under python -O: its assertions protect the data")
