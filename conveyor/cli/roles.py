"""The commands that run the service: `conveyor dev`, `api`, `worker` and `init`
(docs/operations.md, Roles)."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import SystemRandom
from typing import TypeVar

import click
import trio

from actors.child_process import STOP_S
from actors.demand_reporter import DemandReporter
from actors.runtime import Child, Strategy, Supervisor
from conveyor.api.server.server import GRACE_S, HttpServer
from conveyor.bootstrap.body_memory import body_memory_mb
from conveyor.bootstrap.gateway import FetchService, open_fetch_service
from conveyor.bootstrap.local_gateway import LocalGateway
from conveyor.bootstrap.runtime import (
    SHARED_ENGINES,
    Runtime,
    create_resources,
    join_world,
    open_runtime,
)
from conveyor.cli.entry import set_deadline
from conveyor.cli.shutdown import STOP_S_MAX, cancel_on_signal, end_if_failed, run_command
from conveyor.cli.snapshot import inspection_child
from conveyor.config import Settings, unknown_settings
from conveyor.domain import limits
from conveyor.gateway.server import HEAD_LIMITS
from conveyor.logs import set_up_logging
from conveyor.metrics_server import Monitor

# A stopping API serves this long after it reports that it is not ready. Load balancers check every
# few seconds; requests that they still send here would otherwise be refused.
API_DRAIN_S = 5.0
# A stopping gateway ends its calls this long before it closes their connections, so that their
# clients are told. A browser takes a part of it to end the page.
CUT_S = 1.0

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def address_options(command: F) -> F:
    """Adds --host and --port."""
    host = click.option("--host", help="Address to listen on, instead of CONVEYOR_HOST.")
    port = click.option(
        "--port", type=click.IntRange(0, 65535), help="Port, instead of CONVEYOR_PORT; 0 is free."
    )
    return host(port(command))


def at_address(settings: Settings, host: str | None, port: int | None) -> Settings:
    settings = settings if host is None else replace(settings, host=host)
    return settings if port is None else replace(settings, port=port)


def shared_among(settings: Settings, processes: int) -> Settings:
    """Divides concurrency and memory among the processes, rounded up."""
    return replace(
        settings,
        concurrency=-(-settings.concurrency // processes),
        body_memory_mb=max(-(-body_memory_mb(settings) // processes), limits.BODY_MEMORY_MB_MIN),
    )


@click.command()
@click.option(
    "--processes",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Processes that fetch, this one included.",
)
@address_options
@click.pass_obj
def dev(settings: Settings, processes: int, host: str | None, port: int | None) -> None:
    """Run the service on this machine: API and worker in one process."""
    settings = at_address(settings, host, port)
    style = settings.log or ("text" if sys.stderr.isatty() else "json")
    _set_up_logging(settings, style)
    refuse_taken_port(settings.host, settings.port)
    if settings.engine in SHARED_ENGINES and processes > 1:
        raise click.ClickException("On a shared engine more processes are more `conveyor worker`s.")
    run_command(_run_dev, shared_among(settings, processes), processes)


async def _run_dev(settings: Settings, processes: int) -> None:
    local = LocalGateway.prepare(settings, SystemRandom())
    if local is None:
        await _serve_dev(settings, processes)
        return
    with local.listener:
        child = Child("local_gateway", run=local.run, stop_grace_s=STOP_S + 1.0)
        await _serve_dev(local.settings, processes, child)


async def _serve_dev(settings: Settings, processes: int, *also: Child) -> None:
    async with open_runtime(settings, role="dev") as world:
        server = HttpServer(
            make_app=lambda ready: world.app(
                ready=ready, supervisor=lambda: supervisor, is_dev=True
            ),
            host=settings.host,
            port=settings.port,
            on_listening=announce,
            is_proxy=world.origins().is_proxy,
        )
        # Only the owner of a data directory has a place for the snapshot of `conveyor ps`.
        is_owner = settings.engine not in SHARED_ENGINES
        supervisor: Supervisor = world.service(
            *([inspection_child(world, "dev", lambda: supervisor)] if is_owner else []),
            *world.helper_processes(processes - 1),
            *also,
            Child("http_server", run=server.run, reports_ready=True, stop_grace_s=GRACE_S + 2.0),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_signal, nursery.cancel_scope)
            nursery.start_soon(end_if_failed, supervisor)
            await supervisor.run()


async def _end_on_signal(scope: trio.CancelScope) -> None:
    await cancel_on_signal(scope)
    click.echo("Stopping: work in flight is handed back.", err=True)


def _set_up_logging(settings: Settings, style: str | None) -> None:
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    set_up_logging("text" if style == "text" else "json", level=level)
    for name, nearest in unknown_settings().items():
        log.warning("no setting has this name", extra={"variable": name, "nearest": nearest})


def announce(url: str) -> None:
    click.echo(f"Conveyor is listening on {url}", err=True)
    click.echo(f"The dashboard is at {url}/ui/", err=True)


def refuse_taken_port(host: str, port: int, setting: str = "CONVEYOR_PORT") -> None:
    """Reports a port that is in use before the engine is opened, instead of a crash later."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            raise click.ClickException(
                f"Cannot listen on {host}:{port}: {error}. "
                f"Choose another with CONVEYOR_HOST or {setting}."
            ) from None


# `conveyor api`: the API without a worker, on a shared engine
# (docs/operations.md, Roles).


@click.command()
@address_options
@click.pass_obj
def api(settings: Settings, host: str | None, port: int | None) -> None:
    """Run the API only. `conveyor worker` processes the tasks."""
    settings = at_address(settings, host, port)
    if settings.engine not in SHARED_ENGINES:
        raise click.ClickException(
            "An embedded engine has one owner: run `conveyor dev`, or set CONVEYOR_ENGINE=postgres "
            "or CONVEYOR_ENGINE=aws."
        )
    _set_up_logging(settings, settings.log)
    refuse_taken_port(settings.host, settings.port)
    run_command(_run_api, settings)


async def _run_api(settings: Settings) -> None:
    async with open_runtime(settings, role="api") as world, trio.open_nursery() as nursery:
        server = HttpServer(
            make_app=lambda ready: world.app(ready=ready, supervisor=lambda: supervisor),
            host=settings.host,
            port=settings.port,
            on_listening=announce,
            is_proxy=world.origins().is_proxy,
        )
        child = Child("http_server", run=server.run, reports_ready=True, stop_grace_s=GRACE_S + 2.0)
        nursery.start_soon(
            cancel_on_signal,
            nursery.cancel_scope,
            STOP_S_MAX,
            partial(_drain_api, server, settings),
        )
        supervisor = world.watched(
            Supervisor("api", strategy=Strategy.ONE_FOR_ONE, children=[child])
        )
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()


async def _drain_api(server: HttpServer, settings: Settings) -> None:
    """Reports not ready, and continues to serve until load balancers have noticed."""
    server.is_ready = False
    await trio.sleep(min(API_DRAIN_S, settings.drain_s))


# `conveyor worker`: a worker process on a shared engine, or a helper of the owner of a directory
# (docs/operations.md, Roles).


@click.command()
@click.pass_obj
def worker(settings: Settings) -> None:
    """Process tasks of a shared engine until a signal arrives.

    On a data directory, help the process that owns it until that process ends. `scrape` and `dev`
    start such helpers themselves.
    """
    _set_up_logging(settings, settings.log)
    if settings.metrics_port is not None:
        refuse_taken_port(settings.host, settings.metrics_port, "CONVEYOR_METRICS_PORT")
    run_command(_work if settings.engine in SHARED_ENGINES else run_helper, settings)


async def _work(settings: Settings) -> None:
    async with open_runtime(settings, role="worker") as world, trio.open_nursery() as nursery:
        draining = trio.Event()

        async def drain() -> None:
            draining.set()
            await world.drain()

        nursery.start_soon(cancel_on_signal, nursery.cancel_scope, STOP_S_MAX, drain)
        supervisor = world.worker(*_monitoring(world, draining), *_scaling(world))
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()


def _monitoring(world: Runtime, draining: trio.Event) -> list[Child]:
    settings = world.settings
    if settings.metrics_port is None:
        return []
    monitor = Monitor(
        metrics=world.metrics,
        host=settings.host,
        port=settings.metrics_port,
        build=settings.build,
        # It starts after the worker, whose engine has answered by then.
        is_ready=lambda: not draining.is_set(),
    )
    return [Child("monitor", run=monitor.run, reports_ready=True)]


def _scaling(world: Runtime) -> list[Child]:
    if world.settings.scaling is None:
        return []
    reporter = DemandReporter(
        env=world.env,
        metrics=world.metrics,
        deployment=world.settings.scaling,
        # A line of its own: the logger would make it a field of its JSON.
        emit=partial(click.echo, err=True),
    )
    return [Child("demand_reporter", run=reporter.run)]


async def run_helper(settings: Settings) -> None:
    async with join_world(settings) as world, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_on_signal, nursery.cancel_scope)
        nursery.start_soon(_cancel_at_end_of_input, nursery.cancel_scope)
        supervisor = world.helper()
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()


async def _cancel_at_end_of_input(scope: trio.CancelScope) -> None:
    """Cancels at the end of standard input. The owner holds the other end of the pipe, which
    closes even if the owner is killed.
    """
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as owner:
        while await owner.receive_some():
            pass
    set_deadline(STOP_S_MAX)
    scope.cancel(reason="the owner is gone")


# `conveyor gateway`: our own gateway, with browsers
# (docs/gateway.md).


@click.command()
@address_options
@click.option("--inherit", type=int, hidden=True, help="Descriptor of a listening socket.")
@click.pass_obj
def gateway(settings: Settings, host: str | None, port: int | None, inherit: int | None) -> None:
    """Run our own gateway, which fetches and renders pages for workers and the SDK.

    Workers use it with CONVEYOR_GATEWAY_URL=http://HOST:PORT/v1/.
    """
    settings = at_address(settings, host, port)
    _set_up_logging(settings, settings.log)
    if inherit is None:
        refuse_taken_port(settings.host, settings.port)
    run_command(_run_gateway, settings, inherit)


async def _run_gateway(settings: Settings, inherit: int | None) -> None:
    async with (
        open_fetch_service(settings, SystemRandom()) as world,
        trio.open_nursery() as nursery,
    ):
        server = HttpServer(
            make_app=world.app,
            host=settings.host,
            port=settings.port,
            on_listening=partial(_announce_gateway, world) if inherit is None else lambda _: None,
            head_limits=HEAD_LIMITS,
            listeners=[] if inherit is None else [_inherited(inherit)],
            grace_s=_gateway_grace_s(settings, inherit),
        )
        supervisor = Supervisor(
            "gateway",
            strategy=Strategy.ONE_FOR_ONE,
            children=[
                *world.children,
                Child(
                    "http_server",
                    run=server.run,
                    reports_ready=True,
                    stop_grace_s=server.grace_s + 2.0,
                ),
            ],
        )

        async def drain() -> None:
            await _drain_api(server, settings)
            world.service.end_calls_at(trio.current_time() + server.grace_s - CUT_S)

        nursery.start_soon(cancel_on_signal, nursery.cancel_scope, STOP_S_MAX, drain)
        if inherit is not None:
            nursery.start_soon(_cancel_at_end_of_input, nursery.cancel_scope)
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()


def _gateway_grace_s(settings: Settings, inherit: int | None) -> float:
    """Returns the time for the calls under way at shutdown: what `_drain_api` leaves of the drain.
    The program that starts a gateway of its own has ended its calls, and waits only STOP_S."""
    return GRACE_S if inherit is not None else max(GRACE_S, settings.drain_s - API_DRAIN_S)


def _announce_gateway(world: FetchService, url: str) -> None:
    if world.why_no_browser:
        click.echo(f"Without a browser, js_render is refused: {world.why_no_browser}.", err=True)
    click.echo(f"The gateway is listening on {url}/v1/", err=True)


def _inherited(descriptor: int) -> trio.SocketListener:
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


# `conveyor init`: creates the resources of a shared engine that do not exist yet
# (docs/operations.md, Roles).


@click.command()
@click.pass_obj
def init(settings: Settings) -> None:
    """Create or update the tables, the bucket and the queues. It is safe to repeat."""
    if settings.engine not in SHARED_ENGINES:
        raise click.ClickException(
            "An embedded engine makes what it needs by itself: this is for "
            "CONVEYOR_ENGINE=postgres and CONVEYOR_ENGINE=aws."
        )
    for line in trio.run(create_resources, settings):
        click.echo(f"ready: {line}")
