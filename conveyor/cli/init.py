"""`conveyor init`: makes what the AWS engine needs, where it is not there
(docs/operations.md, Roles)."""

from __future__ import annotations

import click
import trio

from conveyor.bootstrap import AWS, make_ready
from conveyor.config import Settings


@click.command()
@click.pass_obj
def init(settings: Settings) -> None:
    """Make the table, the bucket and the queues; doing it again is fine."""
    if settings.engine != AWS:
        raise click.ClickException(
            "An embedded engine makes what it needs by itself: this is for CONVEYOR_ENGINE=aws."
        )
    for line in trio.run(make_ready, settings):
        click.echo(f"ready: {line}")
