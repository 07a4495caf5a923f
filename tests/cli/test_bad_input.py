"""What people get wrong: each mistake is a sentence and exit 2, and nothing is scraped."""

from __future__ import annotations

import pytest

from tests.cli.program import Ended, Program

pytestmark = pytest.mark.slow


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended
    assert ended.err.startswith(("Error: ", "Usage: "))
    assert ended.out == ""
    for word in words:
        assert word in ended.err


def test_a_list_that_is_not_there_is_named(program: Program) -> None:
    assert_refused(program.run("scrape", "nowhere.txt"), "nowhere.txt", "No such file")


def test_a_folder_is_no_list(program: Program) -> None:
    assert_refused(program.run("scrape", "."), "Is a directory")


def test_a_binary_file_is_no_list(program: Program) -> None:
    (program.folder / "list.bin").write_bytes(b"\x89PNG\xff\xfe\x00")

    assert_refused(program.run("scrape", "list.bin"), "not UTF-8 text", "one URL a line")


def test_an_empty_list_holds_no_url(program: Program) -> None:
    program.write("list.txt", "", "# nothing but a remark")

    assert_refused(program.run("scrape", "list.txt"), "holds no URL")


def test_an_empty_standard_input_holds_no_url(program: Program) -> None:
    assert_refused(program.run("scrape", "-"), "holds no URL")


def test_bad_urls_are_named_by_line(program: Program) -> None:
    program.write("list.txt", "https://example.com/", "", "# remark", "ftp://a.example/", "none")

    ended = program.run("scrape", "list.txt")

    assert_refused(ended, "2 of 3 lines", "line 4: unsupported_scheme", "line 5: malformed_url")
    assert "--skip-invalid" in ended.err
    assert not (program.folder / "scraped").exists()


def test_only_the_first_bad_lines_are_shown(program: Program) -> None:
    program.write("list.txt", *["none"] * 500)

    ended = program.run("scrape", "list.txt")

    assert_refused(ended, "line 10:", "... and 490 more")
    assert "line 11:" not in ended.err


def test_a_list_of_bad_urls_alone_is_empty_once_they_are_skipped(program: Program) -> None:
    program.write("list.txt", "none")

    assert_refused(program.run("scrape", "list.txt", "--skip-invalid"), "holds no URL")


def test_private_targets_are_refused_unless_they_are_allowed(program: Program) -> None:
    program.write("list.txt", "http://127.0.0.1:1/", "http://[::1]/", "http://169.254.169.254/")

    ended = program.run("scrape", "list.txt", CONVEYOR_ALLOW_PRIVATE_TARGETS="")

    assert_refused(ended, "line 1:", "line 2:", "line 3:")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("CONVEYOR_PORT", "x", "whole number from 0 to 65535"),
        ("CONVEYOR_PORT", "65536", "whole number from 0 to 65535"),
        ("CONVEYOR_BODY_DAYS", "366", "whole number from 1 to 365"),
        ("CONVEYOR_ALLOW_PRIVATE_TARGETS", "perhaps", "on or off"),
        ("CONVEYOR_ENGINE", "punchcards", "one of embedded, postgres, aws"),
        ("CONVEYOR_TASK_STORE", "punchcards", "one of dynamodb, postgres"),
        ("CONVEYOR_TASK_STORE", "postgres", "needs CONVEYOR_ENGINE=aws"),
        ("CONVEYOR_QUEUE_PREFIX", "a b", "up to 50 letters"),
        ("CONVEYOR_REDIS_URL", "localhost:6379", "redis:// or rediss://"),
        ("CONVEYOR_AUTH", "keys", "CONVEYOR_API_KEYS_FILE"),
    ],
)
def test_a_bad_setting_is_named_with_its_rule(
    program: Program, name: str, value: str, rule: str
) -> None:
    program.write("list.txt", "https://example.com/")

    ended = program.run("scrape", "list.txt", **{name: value})

    assert_refused(ended, rule, name)


@pytest.mark.parametrize(
    "args",
    [
        ("scrape",),
        ("scrape", "list.txt", "-c", "0"),
        ("scrape", "list.txt", "--attempts", "many"),
        ("scrape", "list.txt", "--fast"),
        ("dance",),
        ("demo", "--pages", "0"),
    ],
)
def test_a_bad_command_line_shows_how_it_is_used(program: Program, args: tuple[str, ...]) -> None:
    assert_refused(program.run(*args), "Usage: conveyor")


def test_a_data_directory_that_cannot_be_made_is_named(program: Program) -> None:
    program.write("list.txt", "http://127.0.0.1:1/")
    program.write("taken", "a file")

    ended = program.run("scrape", "list.txt", "--data-dir", "taken")

    assert_refused(ended, "taken")


def test_an_output_folder_that_cannot_be_made_is_named(program: Program) -> None:
    program.write("list.txt", "http://127.0.0.1:1/")
    program.write("taken", "a file")

    assert_refused(program.run("scrape", "list.txt", "-o", "taken"), "taken")


def test_without_a_command_it_prints_its_help(program: Program) -> None:
    ended = program.run()

    assert ended.code == 0
    for command in ("scrape", "dev", "demo", "jobs", "ps"):
        assert f"  {command} " in ended.out


def test_help_loads_no_engine(program: Program) -> None:
    ended = program.run("--help", PYTHONPROFILEIMPORTTIME="1")

    assert ended.code == 0
    assert "conveyor.cli.main" in ended.err
    for heavy in ("conveyor.bootstrap.runtime", "quart", "rich.console", "trio"):
        assert f" {heavy}\n" not in ended.err


def test_version_is_told(program: Program) -> None:
    ended = program.run("--version")

    assert (ended.code, ended.out.split()[0]) == (0, "conveyor,")


def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(program: Program) -> None:
    program.write("list.txt", "http://127.0.0.1:1/")

    ended = program.run("scrape", "list.txt", "-o", "/proc/pages")

    assert_refused(ended, "Cannot write to /proc/pages")


def test_a_command_names_the_package_that_it_lacks(program: Program) -> None:
    program.write("lupa.py", "raise ModuleNotFoundError('not there', name='lupa')")

    ended = program.run("simulate", "--seed", "1", PYTHONPATH=str(program.folder))

    assert_refused(ended, "needs lupa", "pip install 'conveyor[simulate]'")
