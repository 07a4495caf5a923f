"""`conveyor check`, `backup`, `restore` and `migrate-engine`: report what an installation lacks,
copy its data directory while it is in use (docs/deploy.md, Check a deployment; Backup and restore),
and move it to another engine (docs/engines.md, Migration from SQLite to Postgres)."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import click
import msgspec

from conveyor.bootstrap import maintenance
from conveyor.bootstrap.maintenance import Manifest
from conveyor.bootstrap.migration import migrate_engine as copy_directory
from conveyor.cli.shutdown import run_command
from conveyor.config import Settings

_ROLES = ("api", "worker", maintenance.GATEWAY)
_PATH = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option(
    "--role",
    type=click.Choice(_ROLES),
    help="The role whose needs to check; by default CONVEYOR_ROLE, else worker.",
)
@click.option("--json", "as_json", is_flag=True, help="All findings as JSON.")
@click.pass_obj
def check(settings: Settings, role: str | None, as_json: bool) -> None:
    """Check permissions, table, bucket, queues, Redis, clock, gateway and settings.

    It exits with 1 if anything is missing.
    """
    checked = role or (settings.role if settings.role in _ROLES else "worker")
    findings = run_command(maintenance.check_deployment, settings, checked, random.SystemRandom())
    problems = [finding for finding in findings if finding.problem is not None]
    if as_json:
        click.echo(msgspec.json.encode(findings).decode())
    else:
        for finding in findings:
            click.echo(f"{'ok     ' if finding.problem is None else 'MISSING'}  {finding.name}")
            if finding.problem is not None:
                click.echo(f"         {finding.problem}\n         remedy: {finding.remedy}")
        click.echo(f"{len(findings)} checked, {len(problems)} missing.")
    sys.exit(1 if problems else 0)


@click.command()
@click.argument("target", type=_PATH)
@click.pass_obj
def backup(settings: Settings, target: Path) -> None:
    """Copy the data directory to TARGET while it is in use, and verify the copy."""
    manifest = maintenance.back_up(settings, target)
    _show("Backed up", settings.data_dir, target, manifest)
    if "secret.key" not in manifest.files:
        click.echo("Keep CONVEYOR_SECRET_KEY too: the backup does not contain it.", err=True)


@click.command()
@click.argument("source", type=_PATH)
@click.pass_obj
def restore(settings: Settings, source: Path) -> None:
    """Fill the empty data directory from the backup SOURCE, and check every file."""
    manifest = maintenance.restore(settings, source)
    _show("Restored", source, settings.data_dir, manifest)


def _show(verb: str, source: Path, target: Path, manifest: Manifest) -> None:
    size = sum(file.size_bytes for file in manifest.files.values())
    removed = f", {manifest.removed:,} deleted meanwhile" if manifest.removed else ""
    click.echo(
        f"{verb} {source} to {target}: {manifest.tasks:,} tasks, {manifest.bodies:,} bodies"
        f"{removed}, {len(manifest.files):,} files, {size:,} bytes; every body is intact."
    )


@click.command("migrate-engine")
@click.argument("source", type=_PATH)
@click.pass_obj
def migrate_engine(settings: Settings, source: Path) -> None:
    """Copy the stopped data directory SOURCE into the Postgres engine of the settings.

    Rows and queues go to CONVEYOR_DATABASE_URL, bodies to CONVEYOR_BLOB_DIR or CONVEYOR_BUCKET. A
    command that was interrupted goes on when it is started again. It ends with an audit of every
    run on both sides. From its start on, SOURCE can no longer be served.
    """
    done: dict[str, int] = {}
    randomness = random.SystemRandom()
    is_new = run_command(copy_directory, settings, source, randomness, done.__setitem__)
    for step, count in done.items():
        click.echo(f"{step:14}{count:>12,}")
    if is_new:
        click.echo(f"Migrated {source}: the audits of both sides are equal.")
    else:
        click.echo(f"{source} was migrated before.")
