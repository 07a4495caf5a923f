"""`conveyor jobs` against a real server: what each command does when all is well."""

from __future__ import annotations

import json
import signal
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from conveyor.cli.demo import Site
from conveyor.cli.jobs.tables import jobs_table
from conveyor.sdk import JobResponse
from tests.cli.program import Ended, Program, finish, wait_until

pytestmark = pytest.mark.slow

MISSING = 7


def pages(site: Site, *numbers: int) -> list[str]:
    return [f"http://127.0.0.1:{site.port}/page/{number}" for number in numbers]


def submit(caller: Program, site: Site, *numbers: int, options: tuple[str, ...] = ()) -> str:
    caller.write("list.txt", *pages(site, *numbers))
    return str(told(caller.run("jobs", "submit", "list.txt", "--json", *options))["job_id"])


def finished(caller: Program, site: Site, *numbers: int, options: tuple[str, ...] = ()) -> str:
    job_id = submit(caller, site, *numbers, options=options)
    caller.run("jobs", "watch", job_id)
    return job_id


def told(ended: Ended) -> dict[str, Any]:
    (line,) = ended.lines
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


def test_submit_tells_the_job_and_what_to_do_next(caller: Program, site: Site) -> None:
    caller.write("list.txt", *pages(site, 0, 1))

    ended = caller.run("jobs", "submit", "list.txt")

    assert ended.code == 0
    assert "2 tasks accepted" in ended.out
    assert "conveyor jobs watch 01" in ended.out


def test_a_job_is_kept_within_limits_and_given_another_budget(caller: Program, site: Site) -> None:
    options = ("--budget", "credits=10", "--per-host", "2", "--rate", "50")
    job_id = submit(caller, site, 0, options=(*options, "--open"))

    ended = caller.run("jobs", "budget", job_id, "credits=20", "--json")

    job = told(ended)
    assert job["budget"] == {"credits": 20}
    assert job["host_limits"] == {"concurrency": 2, "rate_per_s": 50.0}
    assert "20 credits, 20 left" in caller.run("jobs", "show", job_id).out


@pytest.mark.parametrize("text", ["10", "credits=0", "cost=-1", "cost=", "euros=1"])
def test_a_budget_that_cannot_be_read_is_refused(caller: Program, site: Site, text: str) -> None:
    caller.write("list.txt", *pages(site, 0))

    ended = caller.run("jobs", "submit", "list.txt", "--budget", text)

    assert ended.code == 2
    assert "is not credits=N or cost=N.NN" in ended.err


def test_what_a_job_lacks_is_named(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0)

    webhook = caller.run("jobs", "webhook", job_id)
    closed = caller.run("jobs", "add", job_id, site.urls(1)[0])

    assert webhook.err.strip() == "Error: The job has no webhook."
    assert "The job is closed" in closed.err


def test_submit_passes_on_what_was_asked_for(caller: Program, site: Site) -> None:
    options = ("--name", "Mine", "--external-id", "mine-1", "--max-inflight", "3")
    more = ("--attempts", "2", "--priority", "4", "--param", 'custom_headers={"A": "b"}', "--open")
    hook = ("--webhook", "http://127.0.0.1:1/hook", "--param", "allowed_status_codes=404")

    job_id = submit(caller, site, 0, options=options + more + hook)

    job = told(caller.run("jobs", "show", job_id, "--json"))
    assert (job["name"], job["external_id"], job["status"]) == ("Mine", "mine-1", "open")
    assert (job["max_inflight"], job["max_attempts"], job["priority"]) == (3, 2, 4)
    assert job["zenrows_params"] == {"allowed_status_codes": "404", "custom_headers": "***"}
    assert job["webhook"]["url"] == "http://127.0.0.1:1/hook"


def test_submit_fetches_duplicates_once(caller: Program, site: Site) -> None:
    (page,) = pages(site, 0)
    stdin = "\n".join([page, page + "#again", page])

    ended = caller.run("jobs", "submit", "-", "--dedup", "--watch", "--json", stdin=stdin)

    run = told(ended)
    assert (run["status"], run["stats"]["successful"]) == ("completed", 3)
    job = told(caller.run("jobs", "show", run["job_id"], "--json"))
    results = list(map(json.loads, caller.run("jobs", "results", run["job_id"], "--json").lines))
    shared = {result["index"]: result.get("duplicate_of") for result in results}
    (original,) = [result["task_id"] for result in results if result["index"] == 0]
    assert job["dedup"] is True
    assert shared == {0: None, 1: original, 2: original}


def test_submit_and_watch_is_exit_0_when_all_went_well(caller: Program, site: Site) -> None:
    stdin = "\n".join(pages(site, 0, 1, 2))

    ended = caller.run("jobs", "submit", "-", "--watch", "--json", stdin=stdin)

    assert ended.code == 0
    run = told(ended)
    assert (run["status"], run["stats"]["successful"]) == ("completed", 3)
    assert "Scraping: 3 of 3 done, 0 failed" in ended.err


def test_watch_is_exit_1_when_some_failed(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0, MISSING)

    ended = caller.run("jobs", "watch", job_id)

    assert ended.code == 1
    assert "completed" in ended.out
    assert "1 bad_target" in ended.out
    assert f"conveyor jobs results {job_id} --status failed" in ended.err
    assert f"conveyor jobs rerun {job_id} --status failed --watch" in ended.err


def test_an_interrupted_watch_leaves_the_job_alone(caller: Program, site: Site) -> None:
    # Five minutes of work: it cannot end before the signal arrives, however busy the machine is.
    job_id = submit(caller, site, *range(300), options=("--rate", "1"))
    with caller.start("jobs", "watch", job_id) as process:
        assert process.stderr is not None
        assert "Scraping" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        ended = finish(process)

    assert ended.code == 130
    assert f"`conveyor jobs watch {job_id}` watches it again" in ended.err
    assert told(caller.run("jobs", "stop", job_id, "--json"))["status"] == "stopped"


def test_list_shows_the_jobs_of_its_caller_newest_first(caller: Program, site: Site) -> None:
    assert "There are no jobs" in caller.run("jobs", "list").err
    first = submit(caller, site, 0, options=("--name", "a [red]name"))
    second = submit(caller, site, 0, options=("--open",))

    output, limited = caller.run("jobs", "list"), caller.run("jobs", "list", "--limit", "1")
    still_open = caller.run("jobs", "list", "--status", "open", "--json")

    assert output.out.index(second) < output.out.index(first)
    assert "a [red]name" in output.out
    assert first not in limited.out
    assert "There are more" in limited.err
    assert told(still_open)["job_id"] == second


def test_show_tells_of_a_job_and_its_runs(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, MISSING)
    caller.run("jobs", "rerun", job_id, "--watch")

    ended = caller.run("jobs", "show", job_id)

    assert ended.code == 0
    assert job_id in ended.out
    assert "#1" in ended.out
    assert "#2" in ended.out
    assert "1 bad_target" in ended.out


def test_results_are_a_table_for_people_and_lines_for_programs(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, 1, 2, 3, 4, MISSING)

    output = caller.run("jobs", "results", job_id)
    lines = caller.run("jobs", "results", job_id, "--json").lines
    failed = told(caller.run("jobs", "results", job_id, "--status", "failed", "--json"))

    places = [int(line.split()[0]) for line in output.lines[1:]]
    assert places == list(range(6)), "a table is in the order of the list"
    assert output.out.count("successful") == 5
    assert "target_404" in output.out
    assert pages(site, MISSING)[0] in output.out
    assert sorted(json.loads(line)["index"] for line in lines) == list(range(6))
    assert (failed["index"], failed["error"]["code"]) == (5, "target_404")


def test_download_saves_the_pages_and_a_list_of_them(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, MISSING, 2)

    ended = caller.run("jobs", "download", job_id, "-o", "out", "--json")

    assert ended.code == 0
    assert (told(ended)["files"], told(ended)["missing"]) == (2, 0)
    folder = caller.folder / "out"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["000000.html", "000002.html", "results.jsonl"]
    assert "<h1>Page 2</h1>" in (folder / "000002.html").read_text()
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert rows[1] == {
        "index": 1,
        "url": pages(site, MISSING)[0],
        "status": "failed",
        "error": "target_404",
        "detail": rows[1]["detail"],
    }


def test_download_keeps_pages_of_different_lists_apart(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0, 1, options=("--open",))
    caller.write("more.txt", *pages(site, 2, 3))
    added = told(caller.run("jobs", "add", job_id, "more.txt", "--last", "--json"))
    caller.run("jobs", "watch", job_id)

    ended = caller.run("jobs", "download", job_id, "-o", "out")

    assert (added["accepted_tasks"], added["job_status"]) == (2, "closed")
    assert "4 pages" in ended.out
    texts = [path.read_text() for path in (caller.folder / "out").glob("*.html")]
    assert sorted(text.partition("<h1>")[2][:6] for text in texts) == [
        f"Page {number}" for number in range(4)
    ]


def test_an_open_job_takes_lists_until_it_is_closed(caller: Program, site: Site) -> None:
    job_id = str(told(caller.run("jobs", "submit", "--open", "--json"))["job_id"])
    caller.write("more.txt", *pages(site, 0))

    added = caller.run("jobs", "add", job_id, "more.txt")
    closed = caller.run("jobs", "close", job_id)
    late = caller.run("jobs", "add", job_id, "more.txt")

    assert "1 task added. The job is open for more." in added.out
    assert f"Job {job_id} is closed." in closed.out
    assert late.code == 2
    assert caller.run("jobs", "watch", job_id).code == 0


def test_a_paused_run_waits_until_it_is_resumed(caller: Program, site: Site) -> None:
    # An open job cannot end before it is paused, however busy the machine is.
    job_id = submit(caller, site, 0, options=("--open",))
    paused = caller.run("jobs", "pause", job_id)
    caller.write("more.txt", *pages(site, *range(1, MISSING + 1)))
    caller.run("jobs", "add", job_id, "more.txt")

    with caller.start("jobs", "watch", job_id) as process:
        assert process.stderr is not None
        remarks = process.stderr.readline() + process.stderr.readline()
        requests_before = len(site.request_counts)
        resumed = caller.run("jobs", "resume", job_id, "--json")
        caller.run("jobs", "close", job_id)
        ended = finish(process)

    assert "paused" in paused.out
    assert f"`conveyor jobs resume {job_id}` lets it go on" in remarks
    assert requests_before <= 1
    assert told(resumed)["status"] == "running"
    assert ended.code == 1
    assert "completed" in ended.out


def test_a_stopped_run_keeps_what_it_has_and_can_be_run_on(caller: Program, site: Site) -> None:
    # So many pages that they cannot all be fetched before a slow machine has started a command.
    job_id = submit(caller, site, *range(5_000), options=("--max-inflight", "2"))
    wait_until(lambda: len(site.request_counts) > 4)

    stopped = told(caller.run("jobs", "stop", job_id, "--json"))
    rerun = caller.run("jobs", "rerun", job_id, "--status", "pending,processing", "--json")
    caller.run("jobs", "stop", job_id)

    assert stopped["status"] == "stopped"
    assert stopped["receipt"]["inflight"] == 0
    assert stopped["stats"]["completed"] > 0
    assert told(rerun)["inherited_tasks"] == stopped["stats"]["completed"]


def test_only_what_failed_is_run_again(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0, 1, MISSING)

    ended = caller.run("jobs", "rerun", job_id, "--status", "failed", "--watch")

    assert ended.code == 1
    assert "Over again: 1 task. Kept as they are: 2." in ended.err
    assert site.request_counts == {0: 1, 1: 1}


def test_delete_asks_first(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0)

    alone = caller.run("jobs", "delete", job_id)
    refused = caller.run("jobs", "delete", job_id, stdin="n\n")
    agreed = caller.run("jobs", "delete", job_id, stdin="y\n")

    assert (alone.code, refused.code, agreed.code) == (2, 1, 0)
    assert "give --yes" in alone.err
    assert "Nothing was deleted." in refused.err
    assert "is deleted" in agreed.err
    assert caller.run("jobs", "show", job_id).code == 2


def test_delete_with_yes_does_not_ask(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0)

    ended = caller.run("jobs", "delete", job_id, "--yes")

    assert ended.code == 0
    assert "?" not in ended.err
    assert caller.run("jobs", "list", "--json").out == ""


def test_a_job_may_be_named_by_the_beginning_of_its_id(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0)

    output = caller.run("jobs", "show", job_id[:22], "--json")
    listed = caller.run("jobs", "list", "--json")

    assert json.loads(output.out)["job_id"] == job_id
    assert json.loads(listed.lines[0])["job_id"] == job_id


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, "job name run done"),
        (80, "job name run done failed"),
        (120, "job name list run done failed created"),
    ],
)
def test_a_list_has_the_columns_that_fit_and_the_whole_id(
    caller: Program, site: Site, width: int, columns: str
) -> None:
    name = "the prices of a shop with a long name"
    job_id = finished(caller, site, 0, options=("--name", name))
    listed = caller.run("jobs", "list", "--json")
    job = msgspec.json.decode(listed.lines[0], type=JobResponse)
    screen = StringIO()

    Console(width=width, file=screen).print(jobs_table([job], width))

    head, row = screen.getvalue().splitlines()
    assert head.split() == columns.split()
    assert row.startswith(f"{job_id}  the pri")
    assert "completed" in row
    assert max(len(head.rstrip()), len(row.rstrip())) <= width


def test_a_csv_with_headers_of_its_own_is_submitted(caller: Program, site: Site) -> None:
    url = f"http://127.0.0.1:{site.port}/page/1"
    caller.write("list.csv", "sku,url", f"a1,{url}")

    ended = caller.run(
        *("jobs", "submit", "list.csv", "--id-column", "sku", "-H", "X-A: b"),
        *("--accept-status", "404", "--watch", "--json"),
    )

    assert ended.code == 0
    job = json.loads(caller.run("jobs", "list", "--json").lines[0])
    assert job["zenrows_params"]["allowed_status_codes"] == "404"
    results = caller.run("jobs", "results", job["job_id"], "--json")
    assert json.loads(results.lines[0])["external_id"] == "a1"
