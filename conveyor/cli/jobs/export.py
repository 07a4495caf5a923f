"""`conveyor jobs export` and `verify`: save the results of a run as one file, and check it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from conveyor.cli.jobs.context import JOB, Session, counted, json_option
from conveyor.cli.progress import progress
from conveyor.domain.export_record import ExportFormat, ExportOrder, ExportStatus, Manifest
from conveyor.sdk import ExportResponse, RunResponse
from conveyor.sdk.downloads import manifest_path, replacing, verify_export
from conveyor.sdk.errors import run_of


class Saved(msgspec.Struct, frozen=True):
    """The output of `export` with --json."""

    file: str
    sha256: str
    manifest: Manifest


@click.command()
@click.argument("job", type=JOB)
@click.option(
    "--format",
    "kind",
    type=click.Choice([export_format.value for export_format in ExportFormat]),
    default=ExportFormat.ZIP.value,
    show_default=True,
    help="What kind of file.",
)
@click.option(
    "--order",
    type=click.Choice([export_order.value for export_order in ExportOrder]),
    default=ExportOrder.ID.value,
    show_default=True,
    help="By task id, or as the lines were submitted.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to save it; without it, here, under the run's id.",
)
@click.option("--run", "run_id", metavar="RUN", help="Another run than the latest.")
@json_option
@click.pass_obj
def export(
    session: Session,
    job: str,
    kind: str,
    order: str,
    output: Path | None,
    run_id: str | None,
    as_json: bool,
) -> None:
    """Save the results of a job as one file, and check it."""
    client = session.client
    run = client.run(job, run_id) if run_id else run_of(client.get(job))
    response = _make_export(session, run, kind, order)
    path = output or Path(response.file_name or f"{run.run_id}.{kind}")
    try:
        saved = client.download_export(run.job_id, run.run_id, response.export_id, path)
        if response.format is ExportFormat.CSV:
            with replacing(manifest_path(path)) as file:
                file.write(msgspec.json.encode(response.manifest))
        manifest = verify_export(path)
    except OSError as error:
        raise click.ClickException(
            f"Cannot write to {error.filename or path}: {error.strerror}."
        ) from None
    text = f"{_counts(manifest)} are in {path}"
    session.answer(Saved(str(path), saved.sha256, manifest), text, as_json=as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@json_option
@click.pass_obj
def verify(session: Session, file: Path, as_json: bool) -> None:
    """Check an exported file against its manifest. No server is needed."""
    manifest = verify_export(file)
    text = f"{file} is whole: {_counts(manifest)}."
    session.answer(manifest, text, as_json=as_json)


def _make_export(session: Session, run: RunResponse, kind: str, order: str) -> ExportResponse:
    client = session.client
    started = client.start_export(run.job_id, run.run_id, kind=kind, order=order)
    with progress(session.err, "Exporting", run.stats.total) as show:
        response = client.wait_for_export(
            run.job_id,
            run.run_id,
            started.export_id,
            lambda export: show(export.done, 0, export.total),
        )
    if response.status is not ExportStatus.COMPLETED:
        raise click.ClickException(f"The export failed: {response.error}.")
    return response


def _counts(manifest: Manifest) -> str:
    words = [f"{count:,} {status}" for status, count in sorted(manifest.counts.items())]
    return f"{counted(manifest.entries, 'task')} ({', '.join(words) or 'none'})"
