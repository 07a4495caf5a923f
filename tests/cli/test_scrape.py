"""`conveyor scrape`: a list in, a folder out, whatever happens in between."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from conveyor.cli.demo import Site, is_flaky, is_missing
from tests.cli.program import Program, finish, wait_until

pytestmark = pytest.mark.slow

GOOD = [number for number in range(250) if not is_missing(number)]
CONCURRENCY = 5


def pages(site: Site, *numbers: int) -> list[str]:
    return [f"http://127.0.0.1:{site.port}/page/{number}" for number in numbers]


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_good_list_becomes_a_folder_of_pages_and_exit_0(program: Program, site: Site) -> None:
    program.write("list.txt", "# three pages", *pages(site, 0, 1), "", *pages(site, 2))

    ended = program.run("scrape", "list.txt", "-o", "out", "--json")

    assert ended.code == 0
    summary = json.loads(ended.lines[-1])
    assert summary.keys() == {"job_id", "total", "successful", "failed", "seconds"}
    assert (summary["total"], summary["successful"], summary["failed"]) == (3, 3, 0)
    rows = results_in(program.folder / "out")
    assert [row["file"] for row in rows] == ["000000.html", "000001.html", "000002.html"]
    assert "<h1>Page 2</h1>" in (program.folder / "out" / "000002.html").read_text()


def test_a_missing_page_is_exit_1_and_the_others_are_there(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 7, 1))

    ended = program.run("scrape", "list.txt", "-o", "out", "--json")

    assert ended.code == 1
    summary = json.loads(ended.lines[-1])
    assert (summary["total"], summary["successful"], summary["failed"]) == (3, 2, 1)
    rows = results_in(program.folder / "out")
    assert [row["status"] for row in rows] == ["successful", "failed", "successful"]
    assert rows[1]["error"] == "target_404"
    assert "file" not in rows[1]


def test_a_list_may_come_on_standard_input(program: Program, site: Site) -> None:
    ended = program.run("scrape", "-", "-o", "out", stdin="\n".join(pages(site, 4, 5)))

    assert ended.code == 0
    assert len(results_in(program.folder / "out")) == 2


def test_bad_lines_may_be_left_out(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0), "none", "ftp://a.example/", *pages(site, 1))

    ended = program.run("scrape", "list.txt", "-o", "out", "--skip-invalid", "--json")

    assert ended.code == 0
    assert json.loads(ended.lines[-1])["total"] == 2
    assert [row["url"] for row in results_in(program.folder / "out")] == pages(site, 0, 1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_list_goes_on_where_it_was_interrupted(
    program: Program, site: Site, how: signal.Signals
) -> None:
    program.write("list.txt", *pages(site, *GOOD))
    command = ("scrape", "list.txt", "-o", "out", "-c", str(CONCURRENCY), "--json")
    with program.start(*command) as process:
        wait_until(lambda: len(site.asked) > 60 or process.poll() is not None)
        process.send_signal(how)
        interrupted = finish(process)

    ended = program.run(*command)

    if how is signal.SIGKILL:
        assert interrupted.code == -signal.SIGKILL
    else:
        assert interrupted.code == 130
        assert "The same command goes on from there." in interrupted.err
    assert interrupted.out == ""
    assert ended.code == 0
    assert "Going on with this list where it stopped." in ended.err
    assert json.loads(ended.lines[-1])["successful"] == len(GOOD)
    rows = results_in(program.folder / "out")
    assert [row["index"] for row in rows] == list(range(len(GOOD)))
    assert {row["status"] for row in rows} == {"successful"}
    assert len(list((program.folder / "out").glob("*.html"))) == len(GOOD)
    again = site.asked.total() - len(GOOD) - sum(map(is_flaky, GOOD))
    assert 0 <= again <= 2 * CONCURRENCY  # As many may be written as are fetched.


def test_a_finished_list_is_scraped_anew(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 1))
    first = program.run("scrape", "list.txt", "-o", "out", "--json")

    second = program.run("scrape", "list.txt", "-o", "out", "--json")

    assert (first.code, second.code) == (0, 0)
    assert json.loads(first.lines[-1])["job_id"] != json.loads(second.lines[-1])["job_id"]
    assert site.asked == {0: 2, 1: 2}


def test_a_second_process_on_the_same_data_is_told_who_has_it(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, *GOOD))
    program.write("other.txt", *pages(site, 0))
    with program.start("scrape", "list.txt", "-c", "1") as process:
        wait_until(lambda: len(site.asked) > 2 or process.poll() is not None)

        second = program.run("scrape", "other.txt")

        assert process.poll() is None
    assert second.code == 2
    assert second.err.startswith("Error: ")
    assert str(process.pid) in second.err
    assert second.out == ""


def test_a_list_of_results_that_cannot_be_put_in_place_is_told(
    program: Program, site: Site
) -> None:
    program.write("list.txt", *pages(site, 0))
    (program.folder / "out" / "results.jsonl").mkdir(parents=True)

    ended = program.run("scrape", "list.txt", "-o", "out")

    assert ended.code == 2
    assert "Error: Cannot write to out: Is a directory." in ended.err
