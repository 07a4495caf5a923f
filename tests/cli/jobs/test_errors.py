"""`conveyor jobs` when something is wrong: a sentence to act on, exit 2, never a traceback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from conveyor.cli.demo import Site
from tests.cli.program import Program, dev_server
from tests.cli.test_bad_input import assert_refused

pytestmark = pytest.mark.slow

NOBODYS = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


def test_a_server_that_is_not_there_is_named_with_how_to_start_one(program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

    ended = program.run("jobs", "--server", url, "list")

    assert_refused(ended, f"No server answers at {url}", "`conveyor dev`", "CONVEYOR_URL")


def test_another_program_on_the_port_is_no_server(program: Program, site: Site) -> None:
    ended = program.run("jobs", "list", CONVEYOR_URL=f"http://127.0.0.1:{site.port}")

    assert_refused(ended, "does not speak as Conveyor does", "--server")


@pytest.mark.parametrize("server", ["localhost:8080", "ftp://example.com", "http://", "x y"])
def test_an_address_that_is_none_is_refused(program: Program, server: str) -> None:
    assert_refused(program.run("jobs", "--server", server, "list"), "like http://127.0.0.1:8080")


def test_an_api_key_that_no_header_can_hold_is_refused(program: Program) -> None:
    assert_refused(program.run("jobs", "--api-key", "clé\n", "list"), "printable ASCII")


def test_an_api_key_that_is_not_known_is_told_where_to_give_one(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("the right one\n")
    settings = {"CONVEYOR_AUTH": "keys", "CONVEYOR_API_KEYS_FILE": "keys"}
    with dev_server(tmp_path, **settings) as url:
        wrong = program.run("jobs", "list", CONVEYOR_URL=url, CONVEYOR_API_KEY="wrong")
        right = program.run("jobs", "list", CONVEYOR_URL=url, CONVEYOR_API_KEY="the right one")

    assert_refused(wrong, "--api-key", "CONVEYOR_API_KEY")
    assert right.code == 0


@pytest.mark.parametrize("command", ["show", "watch", "results", "stop", "pause", "close"])
def test_a_job_that_is_not_there_is_told(caller: Program, command: str) -> None:
    ended = caller.run("jobs", command, NOBODYS)

    assert_refused(ended, "There is no such job", "`conveyor jobs list`")


def test_somebody_elses_job_is_not_there(caller: Program, site: Site) -> None:
    caller.write("list.txt", *site.urls(1))
    job_id = caller.run("jobs", "submit", "list.txt").out.split()[1].rstrip(":")

    ended = caller.run("jobs", "show", job_id, CONVEYOR_API_KEY="somebody else")

    assert_refused(ended, "There is no such job")


@pytest.mark.parametrize("job_id", ["..", "a/b", "?", ""])
def test_what_cannot_be_an_id_is_not_sent(caller: Program, job_id: str) -> None:
    assert_refused(caller.run("jobs", "show", job_id), "is not the id of a job")


def test_a_run_that_is_not_there_is_told(caller: Program, site: Site) -> None:
    caller.write("list.txt", *site.urls(1))
    job_id = caller.run("jobs", "submit", "list.txt").out.split()[1].rstrip(":")

    assert_refused(caller.run("jobs", "results", job_id, "--run", NOBODYS), "There is no such run")
    assert_refused(caller.run("jobs", "results", job_id, "--run", ".."), "not the id of a run")


def test_bad_urls_are_named_by_their_line(caller: Program) -> None:
    caller.write("list.txt", "# remark", "https://example.com/", "", "ftp://a.example/", "none")

    ended = caller.run("jobs", "submit", "list.txt")

    assert_refused(ended, "line 4: unsupported_scheme", "line 5: malformed_url", "nothing was")
    assert caller.run("jobs", "list", "--json").out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--param", "colour=red"), ("zenrows_params/colour", "There is no parameter")),
        (("--param", "colour"), ("KEY=VALUE",)),
        (("--external-id", "a b"), ("external_id",)),
        (("--webhook", "gopher://a.example/"), ("webhook/url",)),
        (("--max-inflight", "0"), ("--max-inflight",)),
        (("--attempts", "99"), ("--attempts",)),
    ],
)
def test_a_bad_option_is_named(
    caller: Program, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    caller.write("list.txt", "https://example.com/")

    assert_refused(caller.run("jobs", "submit", "list.txt", *options), *words)


def test_a_list_that_cannot_be_read_is_named(caller: Program) -> None:
    caller.write("empty.txt")

    assert_refused(caller.run("jobs", "submit", "nowhere.txt"), "nowhere.txt")
    assert_refused(caller.run("jobs", "submit", "empty.txt"), "holds no URL")
    assert_refused(caller.run("jobs", "submit"), "Give a FILE")


def test_what_the_state_of_a_job_forbids_is_told(caller: Program, site: Site) -> None:
    caller.write("list.txt", *site.urls(1))
    job_id = caller.run("jobs", "submit", "list.txt").out.split()[1].rstrip(":")
    caller.run("jobs", "watch", job_id)

    assert_refused(caller.run("jobs", "stop", job_id), "cannot be stopped")
    assert_refused(caller.run("jobs", "add", job_id, "list.txt"), "was received")
    assert_refused(caller.run("jobs", "rerun", job_id, "--status", "lost"), "status")


def test_a_folder_that_cannot_be_written_to_is_named(caller: Program, site: Site) -> None:
    caller.write("list.txt", *site.urls(1))
    job_id = caller.run("jobs", "submit", "list.txt").out.split()[1].rstrip(":")
    caller.run("jobs", "watch", job_id)

    assert_refused(caller.run("jobs", "download", job_id, "-o", "/proc/pages"), "/proc/pages")
    assert_refused(caller.run("jobs", "download", job_id, "-o", "list.txt"), "list.txt")
