"""`conveyor scrape`: a list in, a folder out, whatever happens in between."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from conveyor.cli.demo import Site, is_flaky, is_missing
from tests.cli.interruptions import interrupt_often
from tests.cli.program import Ended, Program, finish, wait_until

pytestmark = pytest.mark.slow

GOOD = [number for number in range(250) if not is_missing(number)]
CONCURRENCY = 5
FIELDS = {
    "index",
    "url",
    "status",
    "file",
    "http_status",
    "final_url",
    "content_type",
    "bytes",
    "sha256",
    "seconds",
    "attempts",
}


def pages(site: Site, *numbers: int) -> list[str]:
    return [f"http://127.0.0.1:{site.port}/page/{number}" for number in numbers]


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def summary_of(ended: Ended) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(ended.lines[-1])
    return summary


def assert_whole(folder: Path, count: int) -> None:
    """One line and one file a page, and each file is what its line says."""
    rows = results_in(folder)
    assert [row["index"] for row in rows] == list(range(count))
    files = {path.name for path in folder.iterdir() if path.name[0] != "."} - {"results.jsonl"}
    assert files == {row["file"] for row in rows if row["status"] == "successful"}
    for row in rows:
        if row["status"] == "successful":
            body = (folder / row["file"]).read_bytes()
            assert (len(body), hashlib.sha256(body).hexdigest()) == (row["bytes"], row["sha256"])


def test_a_good_list_becomes_a_folder_of_pages_and_exit_0(program: Program, site: Site) -> None:
    program.write("list.txt", "# three pages", *pages(site, 0, 1), "", *pages(site, 2))

    ended = program.run("scrape", "list.txt", "-o", "out", "--json")

    assert ended.code == 0
    summary = summary_of(ended)
    assert (summary["total"], summary["successful"], summary["failed"]) == (3, 3, 0)
    rows = results_in(program.folder / "out")
    assert [row["file"] for row in rows] == ["000000.html", "000001.html", "000002.html"]
    assert {frozenset(row) for row in rows} == {frozenset(FIELDS)}
    assert "<h1>Page 2</h1>" in (program.folder / "out" / "000002.html").read_text()
    assert_whole(program.folder / "out", 3)


def test_a_missing_page_is_exit_1_and_the_others_are_there(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 7, 1))

    ended = program.run("scrape", "list.txt", "-o", "out", "--json")

    assert ended.code == 1
    assert "conveyor scrape -o out --retry-failed" in ended.err
    summary = summary_of(ended)
    assert (summary["total"], summary["successful"], summary["failed"]) == (3, 2, 1)
    rows = results_in(program.folder / "out")
    assert [row["status"] for row in rows] == ["successful", "failed", "successful"]
    assert (rows[1]["error"], rows[1]["http_status"]) == ("target_404", 404)
    assert "file" not in rows[1]


def test_a_list_may_come_on_standard_input_or_as_urls(program: Program, site: Site) -> None:
    read = program.run("scrape", "-", "-o", "in", stdin="\n".join(pages(site, 4, 5)))
    named = program.run("scrape", *pages(site, 4, 5), "-o", "named")

    assert (read.code, named.code) == (0, 0)
    assert len(results_in(program.folder / "in")) == len(results_in(program.folder / "named")) == 2


def test_bad_lines_may_be_left_out_and_are_in_the_results(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0), "none", "ftp://a.example/", *pages(site, 1))

    ended = program.run("scrape", "list.txt", "-o", "out", "--skip-invalid", "--json")

    assert ended.code == 0
    assert "line 2: malformed_url" in ended.err
    summary = summary_of(ended)
    assert (summary["total"], summary["invalid"]) == (2, 2)
    rows = results_in(program.folder / "out")
    assert [row["status"] for row in rows] == ["successful", "invalid", "invalid", "successful"]
    assert (rows[2]["error"], rows[2]["detail"][:7]) == ("unsupported_scheme", "line 3:")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_list_goes_on_where_it_was_interrupted(
    program: Program, site: Site, how: signal.Signals
) -> None:
    program.write("list.txt", *pages(site, *GOOD))
    command = ("scrape", "list.txt", "-o", "out", "-c", str(CONCURRENCY), "--json")
    with program.start(*command) as process:
        wait_until(lambda: len(site.request_counts) > 60 or process.poll() is not None)
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
    assert "Going on with this list where it stopped" in ended.err
    assert summary_of(ended)["successful"] == len(GOOD)
    assert_whole(program.folder / "out", len(GOOD))
    again = site.request_counts.total() - len(GOOD) - sum(map(is_flaky, GOOD))
    # A page that was interrupted between its first answer and its retry starts over.
    assert 0 <= again <= 2 * CONCURRENCY


def test_a_finished_list_is_not_fetched_again(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 1))
    program.run("scrape", "list.txt", "-o", "out")

    again = program.run("scrape", "list.txt", "-o", "out", "--json")
    restarted = program.run("scrape", "list.txt", "-o", "out", "--restart")

    assert (again.code, restarted.code) == (0, 0)
    assert "nothing was left to fetch" in again.err
    assert summary_of(again)["fetched"] == 0
    assert site.request_counts == {0: 2, 1: 2}


def test_the_list_of_the_folder_starts_over_if_none_is_given(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 1))
    program.run("scrape", "list.txt", "-o", "out", "--concurrency", "7")

    restarted = program.run("scrape", "-o", "out", "--restart", "--name", "x-{index}")

    assert restarted.code == 0, restarted.err
    assert site.request_counts == {0: 2, 1: 2}
    assert [row["file"] for row in results_in(program.folder / "out")] == [
        "x-000000.html",
        "x-000001.html",
    ]
    assert not list((program.folder / "out").glob("0*.html"))
    assert '"concurrency":7' in (program.folder / "out/.conveyor/scrape.json").read_text()


def test_a_state_that_cannot_be_read_is_no_obstacle_to_a_new_start(
    program: Program, site: Site
) -> None:
    program.write("list.txt", *pages(site, 0))
    program.run("scrape", "list.txt", "-o", "out")
    program.write("out/.conveyor/scrape.json", "{")

    alone = program.run("scrape", "-o", "out", "--restart")
    restarted = program.run("scrape", "list.txt", "-o", "out", "--restart")

    assert (alone.code, restarted.code) == (2, 0), alone.err + restarted.err
    assert "Start over with the list and --restart" in alone.err


def test_failed_pages_are_retried_on_demand(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 3))
    once = program.run("scrape", "list.txt", "-o", "out", "--attempts", "1")

    again = program.run("scrape", "-o", "out", "--retry-failed")

    assert (once.code, again.code) == (1, 0)
    assert site.request_counts == {0: 1, 3: 2}
    assert_whole(program.folder / "out", 2)


def test_a_folder_belongs_to_one_list(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 1))
    program.write("other.txt", *pages(site, 1, 2))
    program.run("scrape", "list.txt", "-o", "out")

    refused = program.run("scrape", "other.txt", "-o", "out")
    updated = program.run("scrape", "other.txt", "-o", "out", "--update")
    known = program.run("scrape", "other.txt", "-o", "out")

    assert refused.code == 2
    assert "another list (list.txt)" in refused.err
    assert "--update" in refused.err
    assert (updated.code, known.code) == (0, 0)
    assert site.request_counts == {0: 1, 1: 1, 2: 1}
    assert_whole(program.folder / "out", 3)


def test_a_lost_page_is_fetched_again_and_no_other(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 1, 2))
    program.run("scrape", "list.txt", "-o", "out")
    (program.folder / "out" / "000001.html").unlink()

    ended = program.run("scrape", "list.txt", "-o", "out")

    assert ended.code == 0
    assert site.request_counts == {0: 1, 1: 2, 2: 1}
    assert_whole(program.folder / "out", 3)


def test_options_are_remembered_and_those_given_later_apply(program: Program, site: Site) -> None:
    program.write("list.txt", *pages(site, 0, 7))
    program.run("scrape", "list.txt", "-o", "out", "--name", "{host}/{path}", "--attempts", "2")

    retried = program.run(
        "scrape", "list.txt", "-o", "out", "--retry-failed", "--accept-status", "404"
    )
    renamed = program.run("scrape", "list.txt", "-o", "out", "--name", "{index}")

    assert retried.code == 0
    names = [row["file"] for row in results_in(program.folder / "out")]
    assert names == ["127.0.0.1/page/0-000000.html", "127.0.0.1/page/7-000001.html"]
    assert renamed.code == 2
    assert "--name cannot change" in renamed.err


def test_two_lists_run_at_the_same_time_and_one_folder_has_one_owner(
    program: Program, site: Site
) -> None:
    program.write("list.txt", *pages(site, *GOOD))
    program.write("other.txt", *pages(site, 0))
    with program.start("scrape", "list.txt", "-c", "1", "-o", "one") as process:
        wait_until(lambda: len(site.request_counts) > 2 or process.poll() is not None)

        second = program.run("scrape", "other.txt", "-o", "two")
        third = program.run("scrape", "list.txt", "-o", "one")

        assert process.poll() is None
    assert second.code == 0
    assert third.code == 2
    assert f"one is in use by another scrape, process {process.pid}" in third.err
    assert "conveyor ps one" in third.err


def test_a_list_of_results_that_cannot_be_put_in_place_is_told(
    program: Program, site: Site
) -> None:
    program.write("list.txt", *pages(site, 0))
    (program.folder / "out" / "results.jsonl").mkdir(parents=True)

    ended = program.run("scrape", "list.txt", "-o", "out")

    assert ended.code == 2
    assert "out/results.jsonl is there" in ended.err


def test_interruptions_at_random_moments_lose_nothing(tmp_path: Path, site: Site) -> None:
    """`python -m tests.cli.interruptions` is the long form."""
    figures = interrupt_often(tmp_path, site, 3, 200, seed=2)

    assert (figures.wrong_pages, figures.tracebacks, figures.wrong_codes) == (0, 0, 0)
    assert figures.refetched_max <= 0
