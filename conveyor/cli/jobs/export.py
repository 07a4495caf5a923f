"""`conveyor jobs export` and `verify`: save the results of a run as one file, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import click
import msgspec

from conveyor.cli.jobs.context import JOB, Session, counted, json_option
from conveyor.cli.progress import progress
from conveyor.domain.export_record import ExportFormat, ExportOrder, ExportStatus, Manifest
from conveyor.sdk import BucketInput, DestinationInput, ExportResponse, RunResponse
from conveyor.sdk.downloads import manifest_path, replacing, verify_export
from conveyor.sdk.errors import run_of


class _To(TypedDict):
    """Where the server puts the file."""

    to: str | None
    endpoint: str | None
    key_id: str | None
    secret_key: str | None
    session_token: str | None
    region: str


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
@click.option(
    "--to",
    metavar="URL",
    help="Let the server put the file there: s3://BUCKET/KEY, or a presigned https URL.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="The S3-compatible service of the bucket, if it is not AWS.",
)
# Keys come from the environment only: a command line is visible to other users.
@click.option("--key-id", envvar="AWS_ACCESS_KEY_ID", hidden=True)
@click.option("--secret-key", envvar="AWS_SECRET_ACCESS_KEY", hidden=True)
@click.option("--session-token", envvar="AWS_SESSION_TOKEN", hidden=True)
@click.option("--region", envvar="AWS_REGION", default="us-east-1", hidden=True)
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
    **to: Unpack[_To],
) -> None:
    """Save the results of a job as one file, and check it.

    With --to, the server puts the file there itself, and nothing is downloaded. For s3:// it gets
    the keys in AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and the region in
    AWS_REGION.
    """
    destination = _destination_from(to)
    if destination is not None and output is not None:
        raise click.UsageError("Give either --to or -o.")
    client = session.client
    run = client.run(job, run_id) if run_id else run_of(client.get(job))
    response = _make_export(session, run, kind, order, destination)
    if destination is not None and response.manifest is not None:
        text = f"{_counts(response.manifest)} are in {response.destination}"
        session.answer(response, text, as_json=as_json)
        return
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


def _destination_from(to: _To) -> DestinationInput | None:
    url = to["to"]
    if url is None:
        return None
    scheme, _, rest = url.partition("://")
    if scheme != "s3":
        return DestinationInput(url=url)
    bucket, _, key = rest.partition("/")
    key_id, secret_key = to["key_id"], to["secret_key"]
    if not bucket or not key or not key_id or not secret_key:
        raise click.UsageError(
            "--to s3:// needs a bucket and a key, and keys in AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY."
        )
    return DestinationInput(
        s3=BucketInput(
            bucket=bucket,
            key=key,
            region=to["region"],
            access_key_id=key_id,
            secret_access_key=secret_key,
            session_token=to["session_token"] or None,
            endpoint=to["endpoint"],
        )
    )


def _make_export(
    session: Session,
    run: RunResponse,
    kind: str,
    order: str,
    destination: DestinationInput | None,
) -> ExportResponse:
    client = session.client
    started = client.start_export(
        run.job_id, run.run_id, kind=kind, order=order, destination=destination
    )
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
