"""`python -m tests.cli.screens`: writes the screens of docs/scrape.md.

It runs the real command against a site on this machine in terminals of three widths (tmux) and
without a terminal, and captures what they show. Some pages of the site are missing, one host asks
for fewer requests, one is slow, and one page never comes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tests.cli.program import CONVEYOR, PATIENCE_S
from tests.tidy.sources import ROOT

DOCUMENT = ROOT / "docs" / "scrape.md"
WIDTHS = (60, 80, 120)
# Loopback addresses count as different hosts.
SHOP, BUSY, SLOW, DEAD = (f"127.0.0.{number}" for number in (1, 2, 3, 4))
BUSY_S = 5.0
PAGE = b"<p>" + b"x" * 20_000
_PART = re.compile(r"(<!-- captured: scrape -->\n).*?(<!-- end: scrape -->)", re.DOTALL)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        host = self.headers["Host"].partition(":")[0]
        if self.path == "/robots.txt" or self.path.startswith("/missing"):
            self._send(404, b"")
        elif host == BUSY and time.monotonic() < self.server.busy_until:
            self._send(429, b"", ("Retry-After", "15"))
        else:
            time.sleep({SHOP: 0.1, SLOW: 3.0, DEAD: 60.0}.get(host, 0.0))
            self._send(200, PAGE)

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        with suppress(BrokenPipeError):  # The command did not wait for the page.
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


class Site(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    busy_until = 0.0

    def urls(self) -> list[str]:
        port = self.server_port
        urls = [f"http://{SHOP}:{port}/products/{number}" for number in range(3_000)]
        urls[100:100] = [f"http://{SHOP}:{port}/missing/{number}" for number in range(12)]
        urls[:0] = [f"http://{BUSY}:{port}/search/{number}" for number in range(3)]
        urls[:0] = [f"http://{SLOW}:{port}/reports/{number}" for number in range(110)]
        return [f"http://{DEAD}:{port}/reports/2026/november/all.html?format=long", *urls]


def main() -> None:
    with tempfile.TemporaryDirectory() as name, _running_site() as site:
        folder = Path(name)
        (folder / "urls.txt").write_text("".join(f"{url}\n" for url in site.urls()))
        shots = []
        for width in WIDTHS:
            site.busy_until = time.monotonic() + BUSY_S
            shots.append(_capture(folder, width))
        site.busy_until = time.monotonic() + BUSY_S
        shots.append(_log(folder))
    text = DOCUMENT.read_text(encoding="utf-8")
    part = "\n\n".join(shots)
    text, count = _PART.subn(lambda match: f"{match[1]}\n{part}\n\n{match[2]}", text)
    assert count == 1, "the document has no place for the screens"
    DOCUMENT.write_text(text, encoding="utf-8")


@contextmanager
def _running_site() -> Iterator[Site]:
    with Site(("0.0.0.0", 0), Handler) as site:
        Thread(target=site.serve_forever, daemon=True).start()
        yield site
        site.shutdown()


def _command(out: str) -> str:
    options = "-c 60 --per-host 25 --timeout 18 --attempts 1"
    return f"conveyor scrape urls.txt -o {out} {options}"


def _capture(folder: Path, width: int) -> str:
    """Shows the middle and the end of a run in a terminal of this width."""
    tmux = ["tmux", "-L", f"conveyor-{folder.name}"]
    run = f"cd {folder}; export CONVEYOR_ALLOW_PRIVATE_TARGETS=1 TERM=xterm; clear; "
    run += _command("pages").replace("conveyor", CONVEYOR, 1)
    size = ["-x", str(width), "-y", "24"]
    subprocess.run([*tmux, "new-session", "-d", *size, f"sh -c '{run}; sleep 600'"], check=True)

    def screen() -> str:
        return subprocess.run(
            [*tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True
        ).stdout.rstrip()

    try:
        middle = _wait_for(screen, lambda text: "hang" in text)
        end = _wait_for(screen, lambda text: "results.jsonl are in" in text)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
        shutil.rmtree(folder / "pages")
    assert all(len(line) <= width for line in (*middle.splitlines(), *end.splitlines()))
    shots = {f"{width} columns, after some seconds": middle, f"{width} columns, at the end": end}
    return "\n\n".join(f"{title}:\n\n{_block(text)}" for title, text in shots.items())


def _log(folder: Path) -> str:
    command = _command("pages")
    environ = {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [CONVEYOR, *command.split()[1:]],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return f"Without a terminal:\n\n{_block(done.stderr.rstrip())}"


def _wait_for(screen: Callable[[], str], holds: Callable[[str], bool]) -> str:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds(text := screen()):
        assert time.monotonic() < give_up_at, text
        time.sleep(0.2)
    return text


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    main()
