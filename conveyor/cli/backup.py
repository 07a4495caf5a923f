"""`conveyor backup` and `conveyor restore`: a data directory, while it is in use
(docs/deploy.md, Backup and restore)."""

from __future__ import annotations

from pathlib import Path

import click

from conveyor.bootstrap import backup as bootstrap
from conveyor.bootstrap.backup import Manifest
from conveyor.config import Settings

_PATH = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("target", type=_PATH)
@click.pass_obj
def backup(settings: Settings, target: Path) -> None:
    """Copy the data directory to TARGET while it is in use, and verify the copy."""
    manifest = bootstrap.back_up(settings, target)
    _show("Backed up", settings.data_dir, target, manifest)
    if "secret.key" not in manifest.files:
        click.echo("Keep CONVEYOR_SECRET_KEY too: the backup does not contain it.", err=True)


@click.command()
@click.argument("source", type=_PATH)
@click.pass_obj
def restore(settings: Settings, source: Path) -> None:
    """Fill the empty data directory from the backup SOURCE, and check every file."""
    manifest = bootstrap.restore(settings, source)
    _show("Restored", source, settings.data_dir, manifest)


def _show(verb: str, source: Path, target: Path, manifest: Manifest) -> None:
    size = sum(file.size_bytes for file in manifest.files.values())
    removed = f", {manifest.removed:,} deleted meanwhile" if manifest.removed else ""
    click.echo(
        f"{verb} {source} to {target}: {manifest.tasks:,} tasks, {manifest.bodies:,} bodies"
        f"{removed}, {len(manifest.files):,} files, {size:,} bytes; every body is intact."
    )
