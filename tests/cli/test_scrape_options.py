"""The options of `conveyor scrape`, each one against a site on this machine."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from warcio.archiveiterator import ArchiveIterator

from conveyor.cli.scrape.command import scrape
from conveyor.cli.scrape.folder import FolderRefused, FolderState
from conveyor.config import Settings
from tests.cli.program import Program
from tests.http_client.test_stream import Certificate

Scrape = Callable[..., Result]
BINARY = bytes(range(256))


class Handler(BaseHTTPRequestHandler):
    """Answers by the path. The server remembers the requests, and robots.txt."""

    protocol_version = "HTTP/1.1"
    server: OptionsSite

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length).decode()
        if self.path == "/robots.txt":
            self._send(*self.server.robots_answer)
            return
        self.server.asked.append((self.command, self.path, body))
        if self.path.startswith("/busy") and len(self.server.asked) == 1:
            self._send(429, b"later", "text/plain", {"Retry-After": "0"})
        elif self.path.startswith("/missing"):
            self._send(404, b"none", "text/plain")
        elif self.path.startswith("/refused"):
            self._send(200, b"<html><head><title>Access denied</title></head></html>", "text/html")
        elif self.path.startswith("/binary"):
            self._send(200, BINARY, "image/png")
        else:
            self._send(200, f"<p>{self.path}</p>".encode(), "text/html")

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer  # noqa: N815

    def _send(
        self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


class OptionsSite(ThreadingHTTPServer):
    daemon_threads = True
    asked: list[tuple[str, str, str]]
    robots_answer: tuple[int, bytes, str]
    scheme = "http"

    def url(self, path: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}{path}"

    def give_rules(self, robots: str) -> None:
        self.robots_answer = (200, robots.encode(), "text/plain")

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


@pytest.fixture(scope="module")
def running() -> Iterator[OptionsSite]:
    with OptionsSite(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def site(running: OptionsSite) -> OptionsSite:
    running.asked = []
    running.give_rules("")
    return running


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scrape:
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(allow_private_targets=True)

    def invoke(*args: str, stdin: bytes | None = None) -> Result:
        ended = CliRunner().invoke(scrape, [*args], obj=settings, input=stdin)
        if not isinstance(ended.exception, SystemExit | FolderRefused | None):
            raise ended.exception
        return ended

    return invoke


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# Formats.


def test_jsonl_has_a_line_per_page_and_goes_on(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    urls = [site.url("/a"), site.url("/binary"), site.url("/missing")]
    folder = tmp_path / "out"
    assert run(*urls, "-o", "out", "--format", "jsonl").exit_code == 1

    ended = run("-o", "out", "--retry-failed", "--accept-status", "404")

    assert ended.exit_code == 0
    content = (folder / "pages.jsonl").read_bytes()
    pages = {row["index"]: row for row in map(json.loads, content.splitlines())}
    assert pages[0]["body"] == "<p>/a</p>"
    assert base64.b64decode(pages[1]["body_base64"]) == BINARY
    assert (pages[2]["body"], pages[2]["http_status"]) == ("none", 404)
    for row in rows_in(folder):
        record = content[row["offset"] : row["offset"] + row["length"]]
        assert json.loads(record)["index"] == row["index"]
    assert site.paths().count("/a") == 1


def test_a_page_that_was_cut_off_leaves_no_bytes_in_a_shared_file(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    run(site.url("/a"), site.url("/b"), "-o", "out", "--format", "jsonl", "-c", "1")
    pages, results = tmp_path / "out/pages.jsonl", tmp_path / "out/results.jsonl"
    whole = pages.read_bytes()
    results.write_text(results.read_text().splitlines(keepends=True)[0])
    pages.write_bytes(whole[:-5])

    assert run("-o", "out").exit_code == 0

    assert pages.read_bytes() == whole
    assert site.paths() == ["/a", "/b", "/b"]


def test_warc_can_be_read_by_others(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    ended = run(site.url("/a"), site.url("/binary"), "-o", "out", "--format", "warc")

    assert ended.exit_code == 0
    with (tmp_path / "out/pages.warc.gz").open("rb") as file:
        found = {
            record.rec_headers["WARC-Target-URI"]: record.content_stream().read()
            for record in ArchiveIterator(file)
            if record.rec_type == "response"
        }
    assert found == {site.url("/a"): b"<p>/a</p>", site.url("/binary"): BINARY}
    row = rows_in(tmp_path / "out")[1]
    content = (tmp_path / "out/pages.warc.gz").read_bytes()
    member = content[row["offset"] : row["offset"] + row["length"]]
    assert gzip.decompress(member).endswith(BINARY + b"\r\n\r\n")


def test_a_shared_file_has_one_writer(run: Scrape, site: OptionsSite) -> None:
    ended = run(site.url("/a"), "--format", "warc", "--processes", "2")

    assert ended.exit_code == 2
    assert "written by one process" in ended.output


# TLS.


def test_a_self_signed_certificate_is_refused_unless_insecure(run: Scrape, tmp_path: Path) -> None:
    with OptionsSite(("127.0.0.1", 0), Handler) as server:
        server.asked, server.scheme = [], "https"
        server.give_rules("")
        server.socket = Certificate(tmp_path).server.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        refused = run(server.url("/a"), "-o", "out", "--attempts", "1")
        rows = rows_in(tmp_path / "out")
        accepted = run("-o", "out", "--retry-failed", "--insecure")

        server.shutdown()
    assert refused.exit_code == 1
    assert rows[0]["status"] == "failed"
    assert "certificate" in rows[0]["detail"]
    assert accepted.exit_code == 0
    assert "--insecure" in accepted.output
    (row,) = rows_in(tmp_path / "out")
    assert (tmp_path / "out" / row["file"]).read_text() == "<p>/a</p>"
    assert server.paths() == ["/a"]


# After a restart of the machine.


@pytest.mark.parametrize("page_format", ["files", "jsonl", "warc"])
def test_after_a_reboot_a_page_with_another_digest_is_fetched_again(
    run: Scrape, site: OptionsSite, tmp_path: Path, page_format: str
) -> None:
    run(site.url("/a"), site.url("/b"), "-o", "out", "--format", page_format, "-c", "1")
    folder = tmp_path / "out"
    row = rows_in(folder)[0]
    damaged = folder / row["file"]
    content = damaged.read_bytes()
    start, length = row.get("offset", 0), row.get("length", len(content))
    damaged.write_bytes(content[:start] + bytes(length) + content[start + length :])
    assert run("-o", "out").exit_code == 0
    assert site.paths() == ["/a", "/b"]
    state = folder / ".conveyor/scrape.json"
    saved = msgspec.json.decode(state.read_bytes(), type=FolderState)
    state.write_bytes(msgspec.json.encode(msgspec.structs.replace(saved, boot_id="earlier")))

    ended = run("-o", "out")

    assert ended.exit_code == 0
    assert site.paths() == ["/a", "/b", "/a"]
    row = rows_in(folder)[0]
    assert row["sha256"] == hashlib.sha256(b"<p>/a</p>").hexdigest()


# Which pages the scrape fetches.


def test_dedup_fetches_equal_requests_once_and_counts_them_once(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    urls = [site.url("/a"), site.url("/b"), site.url("/a")]

    first = run(*urls, "-o", "out", "--dedup", "--json")
    again = run(*urls, "-o", "out", "--json")

    assert sorted(site.paths()) == ["/a", "/b"]
    assert [row["status"] for row in rows_in(tmp_path / "out")][2] == "duplicate"
    for ended in (first, again):
        assert ended.exit_code == 0
        assert json.loads(ended.stdout)["total"] == 2
        assert "2 pages: 2 successful, 0 failed, 1 duplicate" in ended.stderr


def test_invalid_lines_are_counted_alike_each_time(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text(f"{site.url('/a')}\nnone\n")

    first = run("list.txt", "-o", "out", "--skip-invalid", "--json")
    again = run("list.txt", "-o", "out", "--skip-invalid", "--json")

    for ended in (first, again):
        assert ended.exit_code == 0
        summary = json.loads(ended.stdout)
        assert (summary["total"], summary["successful"], summary["invalid"]) == (1, 1, 1)
    row = rows_in(tmp_path / "out")[1]
    assert (row["status"], row["error"], row["detail"][:6]) == (
        "invalid",
        "malformed_url",
        "line 2",
    )


def test_dry_run_fetches_and_writes_nothing(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    ended = run(site.url("/a"), site.url("/a"), "-o", "out", "--dry-run", "--dedup")

    assert ended.exit_code == 0
    assert "1 page of 1 host would be fetched." in ended.stdout
    assert site.asked == []
    assert not (tmp_path / "out").exists()


def test_a_page_larger_than_max_bytes_fails(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    ended = run(site.url("/binary"), site.url("/a"), "-o", "out", "--max-bytes", "200")

    assert ended.exit_code == 1
    rows = rows_in(tmp_path / "out")
    assert (rows[0]["error"], rows[1]["status"]) == ("body_too_large", "successful")
    assert "200" in rows[0]["detail"]


@pytest.mark.parametrize("size", ["0", "-1", "big", "1.5M", "1T", ""])
def test_a_size_that_is_none_is_refused(run: Scrape, site: OptionsSite, size: str) -> None:
    ended = run(site.url("/a"), "--max-bytes", size)

    assert ended.exit_code == 2
    assert f"'{size}' is not a size such as 500k or 10M." in ended.output


def test_a_url_that_may_not_be_fetched_is_named_with_the_way_on(program: Program) -> None:
    settings = {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "off"}

    ended = program.run("scrape", "http://shop.example:8080/", **settings)

    assert ended.code == 2
    assert "  http://shop.example:8080/: forbidden_target: port 8080 may not be" in ended.err
    assert "CONVEYOR_ALLOW_PRIVATE_TARGETS=1" in ended.err


def test_data_is_posted(run: Scrape, site: OptionsSite) -> None:
    ended = run(site.url("/a"), "-o", "out", "-d", '{"q": 1}')

    assert ended.exit_code == 0
    assert site.asked == [("POST", "/a", '{"q": 1}')]


def test_a_site_without_its_scheme_is_told_what_a_url_is(program: Program) -> None:
    ended = program.run("scrape", "example.com")

    assert ended.code == 2
    assert "No such file or directory. A URL begins with http:// or https://." in ended.err


def test_a_proxy_that_is_neither_url_nor_text_is_refused(run: Scrape, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")

    missing = run("http://a.example/", "-x", "none.txt")
    binary = run("http://a.example/", "-x", "binary")

    assert (missing.exit_code, binary.exit_code) == (2, 2)
    assert "is neither a URL nor a file that can be read: No such file" in missing.output
    assert "--proxy binary is no text file." in binary.output


@pytest.mark.parametrize("method", ["put", "PATCH", "DELETE", "OPTIONS"])
def test_a_method_may_be_named_for_all_pages_or_on_a_line(
    run: Scrape, site: OptionsSite, tmp_path: Path, method: str
) -> None:
    line = {"url": site.url("/b"), "method": method, "body": {"q": 2}}
    (tmp_path / "list.ndjson").write_text(json.dumps(line))

    named = run(site.url("/a"), "-X", method, "-d", "q=1", "-o", "named")
    listed = run("list.ndjson", "-o", "listed")

    assert named.exit_code == 0 == listed.exit_code, named.output + listed.output
    name = method.upper()
    assert site.asked == [(name, "/a", "q=1"), (name, "/b", '{"q": 2}')]
    assert (tmp_path / "named" / "000000.html").read_text() == "<p>/a</p>"


def test_head_asks_for_the_status_alone(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    ended = run(site.url("/a"), site.url("/missing"), "-X", "head", "-o", "out")

    assert ended.exit_code == 1
    assert [method for method, *_ in site.asked] == ["HEAD", "HEAD"]
    page, missing = rows_in(tmp_path / "out")
    assert (page["http_status"], page["content_type"], page["bytes"]) == (200, "text/html", 0)
    assert (missing["http_status"], missing["error"]) == (404, "target_404")
    again = run("-o", "out")
    assert len(site.asked) == 2, again.output


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "G ET"])
def test_a_method_that_is_none_is_refused(
    run: Scrape, site: OptionsSite, tmp_path: Path, method: str
) -> None:
    (tmp_path / "list.ndjson").write_text(json.dumps({"url": site.url("/a"), "method": method}))

    named = run(site.url("/a"), "-X", method)
    listed = run("list.ndjson")

    assert (named.exit_code, listed.exit_code) == (2, 1)
    assert "GET, POST, HEAD, PUT, PATCH, DELETE, OPTIONS" in named.output
    assert f"line 1: unsupported_method: {method}" in listed.output
    assert site.asked == []


def test_a_parameter_that_needs_a_gateway_is_refused_before_anything_is_fetched(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    line = {"url": site.url("/a"), "params": {"extract": "auto"}}
    (tmp_path / "list.ndjson").write_text(json.dumps(line))

    named = run(site.url("/a"), "--param", "premium_proxy=true")
    listed = run("list.ndjson")

    assert (named.exit_code, listed.exit_code) == (2, 1)
    assert "premium_proxy needs a gateway with such proxies" in named.output
    assert "line 1: unsupported_param: extract" in listed.output
    assert site.asked == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_method_without_a_body_is_refused_one(
    run: Scrape, site: OptionsSite, tmp_path: Path, method: str
) -> None:
    line = {"url": site.url("/a"), "method": method, "body": "q=1"}
    (tmp_path / "list.ndjson").write_text(json.dumps(line))

    named = run(site.url("/a"), "-X", method, "-d", "q=1")
    listed = run("list.ndjson")

    assert (named.exit_code, listed.exit_code) == (2, 1)
    assert f"A {method} has no body" in named.output
    assert "line 1: body_not_allowed" in listed.output


def test_a_gateway_takes_only_get_and_post(tmp_path: Path) -> None:
    settings = Settings(gateway_url="https://gateway.example/v1/")
    lines = tmp_path / "list.ndjson"
    lines.write_text('{"url": "https://a.example/", "method": "PUT"}')
    runner = CliRunner()

    named = runner.invoke(
        scrape, ["https://a.example/", "-X", "PUT", "--api-key", "k"], obj=settings
    )
    listed = runner.invoke(scrape, [str(lines), "--api-key", "k"], obj=settings)

    assert (named.exit_code, listed.exit_code) == (2, 1)
    assert "gateways take only GET and POST" in named.output
    assert "line 1: unsupported_method: PUT" in listed.output


def test_the_command_that_retries_needs_no_other_option(run: Scrape, site: OptionsSite) -> None:
    """The list was read with options that make its requests."""
    ended = run(site.url("/missing"), "-o", "out", "-d", "q=1", "--attempts", "1")
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("Retry them:"))

    again = run(*line.partition("conveyor scrape ")[2].split())

    assert "1 failed" in again.stderr
    assert site.asked == [("POST", "/missing", "q=1")] * 2


# Input.


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_may_be_gzip(
    run: Scrape, site: OptionsSite, pack: Callable[[bytes], bytes]
) -> None:
    text = f"{site.url('/a')}\n{site.url('/b')}\n".encode()

    ended = run("-", "-o", "out", stdin=pack(text))

    assert ended.exit_code == 0
    assert sorted(site.paths()) == ["/a", "/b"]


def test_gzip_that_is_cut_off_is_told(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    text = "".join(f"{site.url(f'/{number}')}\n" for number in range(200)).encode()
    (tmp_path / "list.txt.gz").write_bytes(gzip.compress(text)[:-40])

    program = Program(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    ended = program.run("scrape", "list.txt.gz", "-o", "out")

    assert ended.code == 2
    assert "list.txt.gz" in ended.err
    assert site.asked == []


def test_an_answer_that_is_no_page_keeps_the_status_of_the_site(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    run(site.url("/refused"), "-o", "out", "--attempts", "1")

    [row] = rows_in(tmp_path / "out")
    assert (row["error"], row["http_status"]) == ("page_blocked", 200)


# Politeness.


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_list_that_robots_txt_forbids_altogether_ends(
    program: Program, site: OptionsSite, processes: str
) -> None:
    site.give_rules("User-agent: *\nDisallow: /\n")

    ended = program.run("scrape", site.url("/a"), site.url("/b"), "--processes", processes)

    assert ended.code == 1
    assert ended.err.count("robots_disallowed") == 2
    assert "0 fetched now" in ended.err
    assert site.paths() == []


def test_robots_txt_is_obeyed_unless_told_otherwise(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    site.give_rules("User-agent: conveyor\nDisallow: /private\n")
    urls = [site.url("/private/1"), site.url("/open")]

    polite = run(*urls, "-o", "out")
    paths = site.paths()
    output = run("-o", "out", "--retry-failed", "--ignore-robots")

    assert (polite.exit_code, output.exit_code) == (1, 0)
    assert paths == ["/open"]
    assert "robots_disallowed" in polite.stderr
    assert site.paths() == ["/open", "/private/1"]
    assert [row["status"] for row in rows_in(tmp_path / "out")] == ["successful"] * 2


def test_a_site_that_cannot_be_reached_fails_by_its_own_error(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        run(f"http://127.0.0.1:{closed.getsockname()[1]}/a", "-o", "out")

    [row] = rows_in(tmp_path / "out")
    assert (row["status"], row["error"]) == ("failed", "connect_failed")


@pytest.mark.parametrize(
    ("status", "page"),
    [
        (404, "<html><head><title>404 Not Found</title></head><h1>404 Not Found</h1></html>"),
        (200, "<html><head><title>Page not found</title></head>Page not found</html>"),
        (200, "<html><body><div id='root'></div><script src='/app.js'></script></body></html>"),
        (403, "<html><head><title>Access denied</title></head>Access denied</html>"),
        (200, "<html><head><title>A shop</title></head><h1>Welcome to the shop</h1></html>"),
    ],
)
def test_a_site_that_has_another_page_in_place_of_robots_txt_allows_all(
    run: Scrape, site: OptionsSite, tmp_path: Path, status: int, page: str
) -> None:
    site.robots_answer = (status, page.encode(), "text/html")

    ended = run(site.url("/a"), "-o", "out")

    assert ended.exit_code == 0, ended.output
    assert [row["status"] for row in rows_in(tmp_path / "out")] == ["successful"]


@pytest.mark.slow
def test_a_site_that_asks_for_fewer_requests_gets_them_later(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    """The site is left alone for a second. Its answer does not count as an attempt."""
    ended = run(site.url("/busy"), site.url("/a"), "-o", "out", "-c", "1", "--attempts", "1")

    assert ended.exit_code == 0
    assert sorted(site.paths()) == ["/a", "/busy", "/busy"]
    assert [row["attempts"] for row in rows_in(tmp_path / "out")] == [1, 1]


# The folder.


def test_the_state_may_be_elsewhere(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    command = (site.url("/a"), site.url("/missing"), "-o", "out", "--data-dir", "state")
    first = run(*command)

    again = run("-o", "out", "--data-dir", "state", "--retry-failed")
    other = run("-o", "out2", "--data-dir", "state")

    assert (first.exit_code, again.exit_code) == (1, 1)
    assert site.paths().count("/a") == 1
    assert (tmp_path / "state/scrape.json").exists()
    assert not (tmp_path / "out/.conveyor/scrape.json").exists()
    assert "Retry them: conveyor scrape -o out --data-dir state --retry-failed" in first.stderr
    assert isinstance(other.exception, FolderRefused)
    assert "has the state of" in str(other.exception)


def test_names_follow_the_pattern(run: Scrape, site: OptionsSite, tmp_path: Path) -> None:
    lines = [{"url": site.url("/x/y"), "id": "k/1"}, {"url": site.url("/"), "id": "../up"}]
    (tmp_path / "list.ndjson").write_text("\n".join(map(json.dumps, lines)))

    ended = run("list.ndjson", "-o", "out", "--name", "{host}/{id}/{path}-{index}")

    assert ended.exit_code == 0
    files = [row["file"] for row in rows_in(tmp_path / "out")]
    assert files == ["127.0.0.1/k_1/x/y-000000.html", "127.0.0.1/_up/index-000001.html"]
    assert all((tmp_path / "out" / file).is_file() for file in files)


def test_restart_starts_over_and_keeps_the_files_of_others(
    run: Scrape, site: OptionsSite, tmp_path: Path
) -> None:
    run(site.url("/a"), site.url("/b"), "-o", "out")
    (tmp_path / "out/notes.txt").write_text("mine")

    ended = run(site.url("/c"), "-o", "out", "--restart", "--format", "jsonl")

    assert ended.exit_code == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".conveyor", "notes.txt", "pages.jsonl", "results.jsonl"]


def test_two_ways_to_go_on_are_refused(run: Scrape, site: OptionsSite) -> None:
    ended = run(site.url("/a"), "--restart", "--update")

    assert ended.exit_code == 2
    assert "Give one of --retry-failed, --restart and --update." in ended.output
