"""How a run is shown in a notebook and in a terminal, and its results as a DataFrame."""

from __future__ import annotations

import io
import secrets
from pathlib import Path

import pytest

from conveyor.cli.demo import Site
from conveyor.domain.model import RunStatus
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.schemas.responses import RunStats, Spend, WaitingResponse
from conveyor.sdk import Client, ProgressBar, RunResponse, TrioClient

ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
INSTANT = "2026-01-01T00:00:00.000Z"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_run(completed: int, waiting_on: WaitingResponse | None = None) -> RunResponse:
    is_over = completed == 10
    return RunResponse(
        run_id=ID,
        job_id=ID,
        run_sequence=1,
        status=RunStatus.COMPLETED if is_over else RunStatus.RUNNING,
        terminal=is_over,
        trigger="manual",
        stats=RunStats(
            total=10,
            completed=completed,
            successful=completed - 1,
            failed=1,
            inflight=10 - completed,
            retrying=0,
            pending=0,
            spend=Spend(0, 0.0),
        ),
        last_batch_received=True,
        created_at=INSTANT,
        updated_at=INSTANT,
        eta_seconds=7,
        waiting_on=waiting_on,
    )


def test_a_terminal_shows_one_line_that_is_updated() -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal)

    bar(a_run(5))
    bar(a_run(10))

    half, end = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert half == f"[{'#' * 15}{'.' * 15}] 5 of 10, 1 failed, 7 s left"
    assert end == f"[{'#' * 30}] 10 of 10, 1 failed, completed\n"


def test_no_progress_is_written_to_a_file() -> None:
    file = io.StringIO()

    ProgressBar(file)(a_run(5))

    assert file.getvalue() == ""


def test_a_notebook_shows_a_bar_and_the_wait_reason() -> None:
    bar = ProgressBar(io.StringIO())

    bar(a_run(5, WaitingResponse(reason=WaitReason.PAUSED, detail="<b>paused</b>")))

    assert bar._repr_html_() == (
        '<progress value="5" max="10"></progress> '
        "5 of 10, 1 failed, waits: &lt;b&gt;paused&lt;/b&gt;"
    )


@pytest.mark.slow
def test_results_are_a_dataframe_in_list_order(caller: Client, site: Site) -> None:
    job = caller.submit(site.urls(9))
    caller.wait(job.job_id, ProgressBar())

    frame = caller.frame(job.job_id)

    assert list(frame.index) == list(range(9))
    assert list(frame["url"]) == site.urls(9)
    assert frame["status"].value_counts().to_dict() == {"successful": 8, "failed": 1}
    assert str(frame["updated_at"].dtype).endswith("UTC]")
    assert frame["error"].dropna().to_dict() == {7: "the target answered with status 404"}


@pytest.mark.slow
def test_a_run_without_results_is_an_empty_dataframe(caller: Client) -> None:
    job = caller.submit({"status": "open"})

    frame = caller.frame(job.job_id)

    assert len(frame) == 0
    assert "url" in frame.columns


@pytest.mark.slow
async def test_tasks_are_yielded_once_each_as_they_complete(server: str, site: Site) -> None:
    async with TrioClient(server, secrets.token_hex(8)) as client:
        job = await client.submit({"status": "open"})
        await client.add_tasks(job.job_id, site.urls(3))
        urls: list[str] = []
        async for result in client.as_completed(job.job_id, timeout_s=60):
            urls.append(result.url)
            if len(urls) == 3:
                await client.add_tasks(job.job_id, site.urls(20)[3:], last=True)

    assert sorted(urls[:3]) == site.urls(3)
    assert sorted(urls) == sorted(site.urls(20))


@pytest.mark.slow
def test_waiting_for_completed_tasks_has_a_time_limit(caller: Client, tmp_path: Path) -> None:
    job = caller.submit({"status": "open"})

    with pytest.raises(TimeoutError):
        list(caller.as_completed(job.job_id, timeout_s=0.2))
