"""`conveyor scrape --crawl` and `--sitemap`, over a site with traps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import until
from tests.e2e.trap_site import TrapSite, a_trap_site

pytestmark = pytest.mark.slow


@pytest.fixture
def site() -> Iterator[TrapSite]:
    with a_trap_site(60) as site:
        yield site


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "conveyor.cli.main", "scrape", *arguments]


def environ() -> dict[str, str]:
    return {**os.environ, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"}


def scrape(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("-o", str(folder), "--attempts", "1", *arguments),
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def paths_in(folder: Path, site: TrapSite) -> set[str]:
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {line["url"].removeprefix(site.url) for line in lines if line["status"] == "successful"}


def tree(site: TrapSite) -> set[str]:
    return {f"/p/{number}" for number in range(site.pages)}


def test_a_crawl_finds_every_page_and_keeps_out_of_the_traps(
    site: TrapSite, tmp_path: Path
) -> None:
    ended = scrape(tmp_path / "x", "--crawl", f"{site.url}/", "--match", "/p/", "--json")

    assert ended.returncode == 0, ended.stderr
    assert paths_in(tmp_path / "x", site) == {"/", *tree(site)}
    assert json.loads(ended.stdout)["successful"] == site.pages + 1


def test_a_crawl_that_is_killed_goes_on_with_the_same_command(
    site: TrapSite, tmp_path: Path
) -> None:
    arguments = ("-o", str(tmp_path / "x"), "--crawl", f"{site.url}/", "--match", "/p/")
    slowly = command(*arguments, "--rate", "15")
    process = subprocess.Popen(slowly, env=environ(), stderr=subprocess.DEVNULL)
    until("some pages", lambda: site.requests["/p/5"] or None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = dict(site.requests)

    ended = scrape(tmp_path / "x", "--crawl", f"{site.url}/", "--match", "/p/", "--rate", "1000")

    assert ended.returncode == 0, ended.stderr
    assert paths_in(tmp_path / "x", site) == {"/", *tree(site)}
    assert site.requests["/p/0"] == before["/p/0"] == 1


def test_depth_and_pages_are_limited(site: TrapSite, tmp_path: Path) -> None:
    near = scrape(tmp_path / "a", "--crawl", f"{site.url}/", "--match", "/p/", "--depth", "2")
    few = scrape(tmp_path / "b", "--crawl", f"{site.url}/", "--match", "/p/", "--max-pages", "7")

    assert (near.returncode, few.returncode) == (0, 0), near.stderr + few.stderr
    assert "There are more pages" not in near.stderr
    assert "There are more pages: --max-pages is 7." in few.stderr
    assert paths_in(tmp_path / "a", site) == {"/", *(f"/p/{number}" for number in range(5))}
    assert len(paths_in(tmp_path / "b", site)) == 7


def test_the_pages_of_a_sitemap_are_fetched(site: TrapSite, tmp_path: Path) -> None:
    ended = scrape(tmp_path / "x", "--sitemap", f"{site.url}/sitemap.xml")

    assert ended.returncode == 0, ended.stderr
    assert paths_in(tmp_path / "x", site) == {"/sitemap.xml", "/", *tree(site)}


def test_the_rounds_of_a_crawl_are_one_visit_of_its_sites(site: TrapSite, tmp_path: Path) -> None:
    began_at = time.monotonic()
    crawl = ("--crawl", f"{site.url}/", "--match", "/p/", "--depth", "3")

    ended = scrape(tmp_path / "x", *crawl, "--rate", "4", "--json")

    count = len(paths_in(tmp_path / "x", site))
    assert site.requests["/robots.txt"] == 1
    # A round that forgot the pace of the one before would start its first page at once.
    assert time.monotonic() - began_at >= (count - 1) / 4
    assert json.loads(ended.stdout)["fetched"] == count
    assert "Going on with" not in ended.stderr


def test_a_crawl_that_is_done_says_so(site: TrapSite, tmp_path: Path) -> None:
    crawl = ("--crawl", f"{site.url}/", "--match", "/p/", "--depth", "1")
    first = scrape(tmp_path / "x", *crawl)

    again = scrape(tmp_path / "x", *crawl)

    assert "nothing was left to fetch" not in first.stderr
    assert "nothing was left to fetch" in again.stderr


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--crawl", "/forbidden/x", "could not be fetched: robots.txt forbids this page"),
        ("--sitemap", "/p/3", "/p/3 is no sitemap."),
        ("--sitemap", "/missing/0", "could not be fetched: the target answered with status 404"),
    ],
)
def test_a_start_that_leads_nowhere_is_named(
    site: TrapSite, tmp_path: Path, option: str, path: str, words: str
) -> None:
    ended = scrape(tmp_path / "x", option, f"{site.url}{path}", "--max-pages", "9")

    assert ended.returncode == 1, ended.stderr
    assert words in ended.stderr
    assert "nothing was left to fetch" not in ended.stderr
    if option == "--crawl":
        assert (
            f"--crawl {site.url}{path} --max-pages 9 --retry-failed --ignore-robots" in ended.stderr
        )
        again = scrape(
            tmp_path / "x", option, f"{site.url}{path}", "--retry-failed", "--ignore-robots"
        )
        assert "3 pages: 3 successful" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--depth", "2", "http://x.example/"], "--depth is for --crawl"),
        (["--crawl", "http://x.example/", "list.txt"], "Give a list, or --crawl"),
        (["--crawl", "ftp://x.example/"], "is no http or https URL"),
        (["--crawl", "http://x.example/", "--format", "warc"], "needs --format files"),
        (["--crawl", "http://x.example/", "--dry-run"], "--dry-run does not go with a crawl"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    ended = scrape(tmp_path / "x", *arguments)

    assert ended.returncode == 2
    assert words in ended.stderr
