"""`conveyor check`: reports what a deployment lacks, and the remedy
(docs/deploy.md, Check a deployment)."""

from __future__ import annotations

import random
import sys

import click
import msgspec

from conveyor.bootstrap.check import check_deployment
from conveyor.cli.shutdown import run_command
from conveyor.config import Settings


@click.command()
@click.option(
    "--role",
    type=click.Choice(["api", "worker"]),
    help="The role whose permissions to check; by default CONVEYOR_ROLE, else worker.",
)
@click.option("--json", "as_json", is_flag=True, help="All findings as JSON.")
@click.pass_obj
def check(settings: Settings, role: str | None, as_json: bool) -> None:
    """Check permissions, table, bucket, queues, Redis, clock and settings.

    It exits with 1 if anything is missing.
    """
    checked = role or (settings.role if settings.role in {"api", "worker"} else "worker")
    findings = run_command(check_deployment, settings, checked, random.SystemRandom())
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
