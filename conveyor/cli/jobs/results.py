"""`conveyor jobs results` and `download`: show the result of each URL, or save the pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import click
import msgspec

from conveyor.cli.jobs.context import JOB, Session, counted, json_option
from conveyor.cli.jobs.tables import results_table
from conveyor.cli.progress import progress
from conveyor.cli.scrape.folder import LIST_NAME
from conveyor.cli.scrape.pages import ResultLine
from conveyor.domain.limits import ORDERED_ROWS_MAX
from conveyor.domain.model import TaskStatus
from conveyor.domain.submit.scraper_params import extension_for
from conveyor.sdk import ApiError, Downloaded, RunResponse, TaskResult
from conveyor.sdk.downloads import replacing
from conveyor.sdk.errors import run_of
from conveyor.usecases.run.results import FILTERS

ROWS_SHOWN = 50
CHUNK = 500
EXIT_SOME_MISSING = 1


class Summary(msgspec.Struct, frozen=True):
    """The output of `download` with --json."""

    job_id: str
    run_id: str
    tasks: int
    files: int
    missing: int


@click.command()
@click.argument("job", type=JOB)
@click.option("--run", "run_id", metavar="RUN", help="Another run than the latest.")
@click.option("--status", type=click.Choice(list(FILTERS)), help="Only tasks like these.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    help=f"How many at most; without it {ROWS_SHOWN} in a table, all with --json.",
)
@json_option
@click.pass_obj
def results(
    session: Session,
    job: str,
    run_id: str | None,
    status: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show the result of each URL.

    With --json, print one line of JSON for each URL.
    """
    if as_json:
        for result in islice(session.client.results(job, run_id=run_id, status=status), limit):
            session.write_json(result)
        return
    run = session.client.run(job, run_id) if run_id else session.client.get(job).latest_run
    # The server reads a longer list in the order of the ids only.
    order = "list" if run is not None and run.stats.total <= ORDERED_ROWS_MAX else "id"
    task_results = session.client.results(job, run_id=run_id, status=status, order=order)
    rows = list(islice(task_results, limit or ROWS_SHOWN))
    if not rows:
        session.remark("There is no such task.")
        return
    session.out.print(results_table(rows, session.out.width))
    if next(task_results, None) is not None:
        session.remark("There are more: --limit shows more of them, --json all.")


@click.command()
@click.argument("job", type=JOB)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Folder for the pages.",
)
@click.option("--run", "run_id", metavar="RUN", help="Another run than the latest.")
@json_option
@click.pass_obj
def download(session: Session, job: str, output: Path, run_id: str | None, as_json: bool) -> None:
    """Save the pages of a job to a folder.

    The folder also gets a list with the result of each URL.
    """
    client = session.client
    run = client.run(job, run_id) if run_id else run_of(client.get(job))
    try:
        output.mkdir(parents=True, exist_ok=True)
        lines = _save_all(session, run, output)
        with replacing(output / LIST_NAME) as file:
            file.write(msgspec.json.Encoder().encode_lines(lines))
    except OSError as error:
        raise click.ClickException(
            f"Cannot write to {error.filename or output}: {error.strerror}."
        ) from None
    files = sum(1 for line in lines if line.file is not None)
    missing = sum(_is_missing(line) for line in lines)
    text = f"{counted(files, 'page')} and {LIST_NAME} are in {output}/"
    session.answer(Summary(job, run.run_id, len(lines), files, missing), text, as_json=as_json)
    if not run.terminal:
        session.remark("The run has not ended: these are its results so far.")
    if missing:
        session.remark(
            f"{counted(missing, 'page')} could not be downloaded; {LIST_NAME} lists them."
        )
        sys.exit(EXIT_SOME_MISSING)


def _save_all(session: Session, run: RunResponse, folder: Path) -> list[ResultLine]:
    task_results = session.client.results(run.job_id, run_id=run.run_id)
    lines: list[ResultLine] = []
    with progress(session.err, "Downloading", run.stats.total) as show:
        for chunk in _chunks(_with_file_names(task_results)):
            scratch = {r.task_id: folder / f".{name}" for name, r in chunk if r.result_url}
            saved = session.client.download_all(run.job_id, scratch, run_id=run.run_id)
            lines += [_line(folder, name, r, saved.get(r.task_id)) for name, r in chunk]
            show(len(lines), sum(map(_is_missing, lines)), max(run.stats.total, len(lines)))
    return sorted(lines, key=lambda line: line.index)


def _with_file_names(task_results: Iterator[TaskResult]) -> Iterator[tuple[str, TaskResult]]:
    """Yields a file name for each result, by position. Each list of an open job counts from 0, so
    further results of a position have their task id in the name."""
    taken: set[int] = set()
    for result in task_results:
        name = f"{result.index:06d}"
        yield (f"{name}-{result.task_id}" if result.index in taken else name), result
        taken.add(result.index)


def _chunks(
    named: Iterator[tuple[str, TaskResult]],
) -> Iterator[Sequence[tuple[str, TaskResult]]]:
    while chunk := tuple(islice(named, CHUNK)):
        yield chunk


def _line(
    folder: Path, name: str, result: TaskResult, saved: Downloaded | ApiError | None
) -> ResultLine:
    line = partial(ResultLine, result.index, result.url, result.status)
    match saved:
        case Downloaded():
            file_name = f"{name}.{extension_for(saved.content_type)}"
            (folder / f".{name}").replace(folder / file_name)
            return line(file=file_name, sha256=saved.sha256)
        case ApiError():
            return line(error=saved.code, detail=saved.detail or saved.title)
    problem = result.error
    return line(error=problem.code if problem else None, detail=problem.detail if problem else None)


def _is_missing(line: ResultLine) -> bool:
    """Whether a page was scraped but could not be saved."""
    return line.file is None and line.status == TaskStatus.SUCCESSFUL
