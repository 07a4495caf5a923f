"""`conveyor`: the program. Without a command it takes its role from CONVEYOR_ROLE
(docs/operations.md, Roles)."""

from __future__ import annotations

import importlib
import signal
import sys

import click

from conveyor import __version__
from conveyor.cli.entry import LAST_STEPS_S, install_handlers, raise_descriptor_limit, set_deadline

_COMMANDS = {
    "scrape": (
        "conveyor.cli.scrape.command",
        "Scrape a list of URLs into a folder, without a server.",
    ),
    "dev": ("conveyor.cli.roles", "Run the service on this machine: API and worker in one."),
    "api": ("conveyor.cli.roles", "Run the API alone, on a shared engine."),
    "worker": ("conveyor.cli.roles", "Run a worker on a shared engine, or help a data's owner."),
    "gateway": ("conveyor.cli.roles", "Run our own gateway: fetch and render pages for workers."),
    "init": ("conveyor.cli.roles", "Make the tables, bucket and queues of a shared engine."),
    "demo": ("conveyor.cli.demo", "Scrape a thousand pages of a bundled local site."),
    "jobs": ("conveyor.cli.jobs.commands", "Submit and manage jobs on a running server."),
    "webhooks": ("conveyor.cli.jobs.webhook", "Manage signing keys and try receivers out."),
    "mcp": ("conveyor.cli.mcp.command", "Offer a running server to an agent, as MCP tools."),
    "simulate": (
        "conveyor.cli.simulate",
        "Run the program from a seed, with faults, and check it.",
    ),
    "ps": ("conveyor.cli.ps", "Show what the processes of this data directory or table do."),
    "check": ("conveyor.cli.maintenance", "Report what this deployment lacks, and the remedy."),
    "health": ("conveyor.cli.health", "Check that the process in this container answers."),
    "backup": (
        "conveyor.cli.maintenance",
        "Copy a data directory while it is in use, and verify it.",
    ),
    "restore": ("conveyor.cli.maintenance", "Restore a data directory from a backup."),
    "migrate-engine": (
        "conveyor.cli.maintenance",
        "Copy a stopped data directory into Postgres, and verify it.",
    ),
}
_LOGGING_COMMANDS = frozenset({"dev", "api", "worker", "gateway"})
"""Commands that report a variable that is no setting in their log."""
_EXTRAS = {"mcp": "mcp", "simulate": "simulate"}
"""Commands that come with packages of their own, and the extra that brings them."""


class _Commands(click.Group):
    """Imports a command only when it is used, so that `conveyor --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _ = _COMMANDS[cmd_name]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if cmd_name not in _EXTRAS:
                raise
            raise click.ClickException(
                f"`conveyor {cmd_name}` needs {error.name}: "
                f"pip install 'conveyor[{_EXTRAS[cmd_name]}]'"
            ) from None
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in _COMMANDS.items()])


@click.group(cls=_Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="conveyor")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Conveyor: a durable batch-scraping service."""
    if "--help" in sys.argv[1:]:
        return  # Nothing runs, and reading the settings would take most of the time.
    from conveyor.config import BadSettings, load_settings, protect_imports, unknown_settings

    protect_imports()
    if ctx.invoked_subcommand in {"jobs", "webhooks"}:
        # These handle Ctrl-C themselves, as an exception: a watch says how to look again.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ctx.obj = load_settings()
    except BadSettings as error:
        raise click.ClickException(str(error)) from None
    if (ctx.invoked_subcommand or ctx.obj.role) not in _LOGGING_COMMANDS:
        for name, nearest in unknown_settings().items():
            hint = f" Did you mean {nearest}?" if nearest else ""
            click.echo(f"Warning: {name} is no setting.{hint}", err=True)
    if ctx.invoked_subcommand is None:
        _run_role(ctx, ctx.obj.role)


def _run_role(ctx: click.Context, role: str | None) -> None:
    if not role:
        click.echo(ctx.get_help())
        return
    command = cli.get_command(ctx, role)
    assert command is not None
    ctx.invoke(command)


def _expected_error() -> type[Exception]:
    """Called only when something was raised: --help needs no such import."""
    from conveyor.domain.errors import ConveyorError

    return ConveyorError


def _is_outage(error: BaseException) -> bool:
    from conveyor.ports.errors import Unavailable

    return isinstance(error, Unavailable)


def _run_cli() -> None:
    """Runs the command. If a nursery raised only expected errors, it raises the error itself."""
    try:
        cli.main(standalone_mode=False)
    except BaseExceptionGroup as group:
        meant, others = group.split((click.ClickException, _expected_error()))
        if meant is None or others is not None:
            raise
        error: BaseException = meant
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def main() -> None:
    """Runs the program. An expected error is shown as a message, without a traceback."""
    install_handlers()
    raise_descriptor_limit()
    try:
        _run_cli()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code if isinstance(error, click.UsageError) else 2)
    except click.Abort:
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except _expected_error() as error:
        click.echo(f"Error: {error}", err=True)
        if _is_outage(error):
            click.echo("`conveyor check` names what is missing and how to add it.", err=True)
        sys.exit(2)
    finally:
        set_deadline(LAST_STEPS_S)


if __name__ == "__main__":
    main()
