"""Tests every example with the package of the clients alone and a real server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from clients.python.collect import collect
from conveyor.cli.demo import Site, site_in_a_thread
from conveyor.sdk import Client, SubmitJobRequest, TaskInput, WebhookInput
from tests.cli.program import dev_server, wait_until
from tests.tidy.sources import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
MISSING = 7
NOTEBOOK = """
import json, sys
cells = json.load(open(sys.argv[1]))["cells"]
names = {}
for cell in cells:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
print(names["frame"]["status"].to_list())
"""
AIRFLOW = """
import sys
from airflow_dag import scrape
folder, *urls = sys.argv[1:]
print(scrape(urls, folder, "run-1"), scrape(urls, folder, "run-1"))
"""


@dataclass(frozen=True, slots=True)
class Examples:
    """Runs examples in a new folder with a new API key."""

    server: str
    key: str
    packages: Path
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONVEYOR_URL": self.server,
            "CONVEYOR_API_KEY": self.key,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.packages}:{EXAMPLES}",
        }

    def run(self, *command: str, **environ: str) -> list[str]:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def python(self, name: str, *arguments: str) -> list[str]:
        return self.run(sys.executable, str(EXAMPLES / name), *arguments)


@contextmanager
def linked_site() -> Iterator[str]:
    """Runs a site of three pages that link to each other."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path in {"/", "/a", "/b"}
            body = b'<title>A page</title><a href="/">home</a><a href="/a">a</a><a href="b">b</a>'
            self.send_response(200 if is_page else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dev_server(tmp_path_factory.mktemp("dev")) as url:
        yield url


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collects the package of the clients alone into a folder."""
    folder = tmp_path_factory.mktemp("packages")
    collect(ROOT, folder)
    return folder


@pytest.fixture
def examples(
    server: str, packages: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Examples:
    return Examples(server, str(request.node.name), packages, tmp_path)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_in_a_thread() as site:
        yield site


def test_every_example_is_listed_and_has_a_test() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh", ".ipynb"}}
    listed, tested = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()

    assert names
    assert [name for name in sorted(names) if f"({name})" not in listed] == []
    assert [name for name in sorted(names) if name.removesuffix(".py") not in tested] == []


def test_the_script_saves_pages_and_names_failures(examples: Examples, site: Site) -> None:
    urls = [site.urls(1)[0], site.urls(8)[MISSING]]

    saved, failed, last = examples.python("sync_client.py", *urls)

    path, _, url = saved.partition(" is ")
    assert url == urls[0]
    assert b"<title>Page 0</title>" in (examples.folder / path).read_bytes()
    assert failed == f"{urls[1]} failed: the target answered with status 404"
    assert last == "1 of 2 pages"


def test_the_script_names_wrong_lines(examples: Examples) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "sync_client.py", "ftp://a.example/"],
        cwd=examples.folder,
        env=examples.environ,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("line 0: unsupported_scheme: ftp://a.example/")


def test_the_asyncio_program_prints_the_titles(examples: Examples, site: Site) -> None:
    lines = examples.python("asyncio_client.py", *site.urls(8))

    good = [f"{url}: Page {number}" for number, url in enumerate(site.urls(7))]
    assert sorted(lines) == [*good, f"{site.urls(8)[MISSING]}: bad_target"]


def test_the_trio_program_waits_for_two_jobs(examples: Examples, site: Site) -> None:
    lines = examples.python("trio_client.py", *site.urls(5))

    assert sorted(lines) == ["first: 3 of 3 pages", "second: 2 of 2 pages"]


def test_the_shell_script_prints_each_result(examples: Examples, site: Site) -> None:
    urls = [site.urls(1)[0], site.urls(8)[MISSING]]

    first, *lines = examples.run("sh", str(EXAMPLES / "curl.sh"), *urls)

    good, bad = sorted(lines, reverse=True)
    assert first.startswith("job 01")
    assert good.startswith(f"successful {urls[0]} ")
    assert int(good.split()[2]) > 10_000
    assert bad == f"failed {urls[1]} 0 bytes"


def test_the_receiver_accepts_genuine_events_only(
    examples: Examples, server: str, site: Site
) -> None:
    log = examples.folder / "events"
    with Client(server, examples.key) as client:
        secret = client.rotate_hmac_key().secret
        with (
            log.open("w") as stdout,
            subprocess.Popen(
                [sys.executable, EXAMPLES / "webhook_receiver.py", "0"],
                env={**examples.environ, "CONVEYOR_WEBHOOK_SECRET": secret},
                stdout=stdout,
            ) as process,
        ):
            try:
                wait_until(lambda: "\n" in log.read_text())
                url = log.read_text().split()[-1]
                forged = httpx.post(url, content=b"{}", trust_env=False)
                job = client.submit(
                    SubmitJobRequest(
                        tasks=[TaskInput(url=site.urls(1)[0])],
                        webhook=WebhookInput(url=url, signature=True),
                    )
                )
                wait_until(lambda: log.read_text().count("\n") == 2)
            finally:
                process.terminate()

    assert forged.status_code == 401
    assert log.read_text().splitlines()[1].startswith(f"run.completed {job.job_id} ")


def test_the_notebook_runs_from_top_to_bottom(examples: Examples, site: Site) -> None:
    notebook = str(EXAMPLES / "notebook.ipynb")

    lines = examples.run(sys.executable, "-c", NOTEBOOK, notebook, URLS=" ".join(site.urls(8)))

    assert lines == [str(["successful"] * 7 + ["failed"])]


def test_the_crawl_example_saves_a_site(examples: Examples) -> None:
    with linked_site() as site:
        lines = examples.python("crawl.py", f"{site}/")

    assert sorted(lines[:-1]) == [f"{site}/", f"{site}/a", f"{site}/b"]
    assert lines[-1] == "completed: 3 pages fetched, 3 saved"
    assert len(list((examples.folder / "pages").iterdir())) == 3


def test_the_agent_reads_a_page(examples: Examples, site: Site) -> None:
    tools, url, *page = examples.python("mcp_client.py", site.urls(1)[0])

    assert tools.startswith("tools: submit, crawl, status")
    assert url == site.urls(1)[0]
    assert page[1].startswith("BEGIN UNTRUSTED PAGE")
    assert "# Page 0" in page


def test_a_repeated_task_of_airflow_dag_finds_its_job(
    examples: Examples, server: str, site: Site
) -> None:
    (line,) = examples.run(sys.executable, "-c", AIRFLOW, "pages", *site.urls(2))

    with Client(server, examples.key) as client:
        assert len(list(client.list())) == 1
    counts = {"successful": 2, "failed": 0}
    assert line == f"{counts} {counts}"
    assert len(list((examples.folder / "pages").iterdir())) == 2
