"""Measures what `conveyor scrape` costs from start to exit, compared with a loop that writes files.

Each arm is a separate process, from cold start to exit, and writes into its own folder: the real
command with one process and with its default number, aiohttp on uvloop with plain writes from the
loop, `curl --parallel`, and scrapy and wget where they are installed. The origin is nginx where it
is installed, because it needs little CPU; otherwise bench/origin.py. A ratio is taken within a
round, and the median of the rounds is shown. Folders are removed at the end: on a file system
mounted with `discard`, creating files after a removal costs up to six times as much.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec

from bench.origin import running_origin

PAGE_BYTES = 20_000
SIZES = (1_000, 10_000, 100_000)
# wget and scrapy are slow, so they fetch a part of the list; figures are per page.
SLOW_SHARE = 20
NGINX = """worker_processes 1; daemon off; pid {folder}/nginx.pid;
error_log {folder}/error.log crit;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000000; default_type text/html;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen unix:{folder}/unused.sock; listen 127.0.0.1:{port} backlog=4096; root {folder};
    location = /robots.txt {{ return 404; }}
    location / {{ rewrite ^ /page.html break; }}
  }}
}}
"""
BARE = """
import asyncio, sys, time
import aiohttp, uvloop

async def main(lines, concurrency, folder):
    pages = iter(enumerate(lines))
    async def work(session):
        for index, url in pages:
            async with session.get(url) as response:
                body = await response.read()
            with open(f"{folder}/{index:06d}.html", "wb") as file:
                file.write(body)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))

lines = open(sys.argv[1]).read().split()
wall, cpu = time.perf_counter(), time.process_time()
uvloop.run(main(lines, int(sys.argv[2]), sys.argv[3]))
# Without the imports: bench/service.py compares this with a service that is already running.
print([time.perf_counter() - wall, time.process_time() - cpu])
"""
SCRAPY = """
import sys
import scrapy
from scrapy.crawler import CrawlerProcess

class Pages(scrapy.Spider):
    name = "pages"
    def start_requests(self):
        for index, url in enumerate(open(sys.argv[1]).read().split()):
            yield scrapy.Request(url, cb_kwargs={"index": index}, dont_filter=True)
    async def start(self):
        for request in self.start_requests():
            yield request
    def parse(self, response, index):
        with open(f"{sys.argv[3]}/{index:06d}.html", "wb") as file:
            file.write(response.body)

process = CrawlerProcess({
    "CONCURRENT_REQUESTS": int(sys.argv[2]), "CONCURRENT_REQUESTS_PER_DOMAIN": int(sys.argv[2]),
    "LOG_LEVEL": "ERROR", "DOWNLOAD_DELAY": 0,
})
process.crawl(Pages)
process.start()
"""


class Measured(msgspec.Struct, frozen=True):
    pages: int
    seconds: float
    cpu_s: float
    rss_mb: float
    disk_bytes: int


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench scrape", description=__doc__)
    parser.add_argument("--n", type=int, help="pages; by default 1,000, 10,000 and 100,000")
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(), help="where the folders are made")
    parser.add_argument("--no-peers", action="store_true", help="only Conveyor and the bare loop")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    sizes = SIZES if options.n is None else (options.n,)
    with running_cheap_origin() as origin:
        print(
            f"origin: {origin.name}, pages of {PAGE_BYTES:,} bytes, {options.concurrency} in flight"
        )
        lines = []
        for count in sizes:
            work = Path(tempfile.mkdtemp(dir=options.dir, prefix=".bench-")).resolve()
            try:
                lines.append(run_size(origin.url, count, work, options))
            finally:
                shutil.rmtree(work)
    if options.json:
        # The goals are stated for 10,000 pages, so that line is printed if it was measured.
        line_shown = next((line for line in lines if line["n"] == 10_000), lines[-1])
        print(msgspec.json.encode(line_shown).decode())


def run_size(url: str, count: int, work: Path, options: argparse.Namespace) -> dict[str, float]:
    arms = ["bare", "conveyor", "conveyor-default"]
    rounds = 1 if count >= 100_000 else options.rounds
    done = [
        {arm: run_arm(arm, url, count, work, options.concurrency) for arm in arms}
        for _ in range(rounds)
    ]
    print(f"\n{count:,} pages")
    print(f"{'':26}{'wall s':>8}{'CPU s':>8}{'CPU ms/page':>13}{'RSS MB':>8}{'disk':>7}")
    for arm in arms:
        show(arm, [result[arm] for result in done])
    if not options.no_peers and count <= 10_000:
        for arm in ("curl", "wget", "scrapy"):
            if is_installed(arm):
                part = count if arm == "curl" else max(count // SLOW_SHARE, 100)
                show(arm, [run_arm(arm, url, part, work, options.concurrency)])
            else:
                print(f"{arm:26} is not installed")

    def ratio(arm: str, field: str) -> float:
        pairs = [(getattr(result[arm], field), getattr(result["bare"], field)) for result in done]
        return round(float(median(ours / bare for ours, bare in pairs)), 3)

    line = {
        "n": count,
        "cpu_ratio": ratio("conveyor", "cpu_s"),
        "wall_ratio": ratio("conveyor", "seconds"),
        "wall_ratio_default": ratio("conveyor-default", "seconds"),
        "rss_mb": round(max(result["conveyor"].rss_mb for result in done), 1),
        "bytes_on_disk_ratio": round(
            max(result["conveyor"].disk_bytes for result in done) / (count * PAGE_BYTES), 3
        ),
    }
    print("  ".join(f"{name} {value}" for name, value in line.items()))
    return line


def show(arm: str, runs: Sequence[Measured]) -> None:
    wall, cpu = median(run.seconds for run in runs), median(run.cpu_s for run in runs)
    per_page = cpu / runs[0].pages * 1000
    rss = max(run.rss_mb for run in runs)
    disk = max(run.disk_bytes for run in runs) / (runs[0].pages * PAGE_BYTES)
    print(f"{arm:26}{wall:>8.2f}{cpu:>8.2f}{per_page:>13.3f}{rss:>8.0f}{disk:>6.2f}x")


def run_arm(arm: str, url: str, count: int, work: Path, concurrency: int) -> Measured:
    """Runs one arm below a forked child, whose usage of child processes is then that of the arm."""
    folder = Path(tempfile.mkdtemp(dir=work))
    urls = folder / "urls.txt"
    urls.write_text("".join(f"{url}/p/{number}\n" for number in range(count)))
    out = folder / "out"
    out.mkdir()
    command = command_of(arm, urls, concurrency, out)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(_measure(command, write))
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    seconds, cpu_s, rss_mb = msgspec.json.decode(content, type=tuple[float, float, float])
    files = [path for path in out.rglob("*") if path.is_file()]
    pages = sum(path.stat().st_size == PAGE_BYTES for path in files)
    assert pages == count, f"{arm}: {pages} of {count} pages"
    size = sum(path.stat().st_size for path in files)
    return Measured(count, seconds, cpu_s, rss_mb, size)


def _measure(command: Sequence[str], write: int) -> int:
    environ = {**os.environ, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"}
    began_at = time.perf_counter()
    with open(os.devnull, "w", encoding="ascii") as null:
        code = subprocess.run(command, env=environ, stdout=null, check=False).returncode
    seconds = time.perf_counter() - began_at
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = (seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    os.write(write, msgspec.json.encode(figures))
    return code


def command_of(arm: str, urls: Path, concurrency: int, out: Path) -> list[str]:
    conveyor = [str(Path(sys.executable).with_name("conveyor")), "scrape", str(urls)]
    conveyor += ["-q", "-o", str(out), "-c", str(concurrency)]
    match arm:
        case "bare":
            return [sys.executable, "-c", BARE, str(urls), str(concurrency), str(out)]
        case "scrapy":
            return [sys.executable, "-c", SCRAPY, str(urls), str(concurrency), str(out)]
        case "conveyor":
            return [*conveyor, "--processes", "1"]
        case "conveyor-default":
            return conveyor
        case "wget":
            return ["wget", "-q", "-i", str(urls), "-P", str(out)]
        case "curl":
            lines = urls.read_text().split()
            config = urls.with_suffix(".curl")
            config.write_text(
                "".join(
                    f'url = "{line}"\noutput = "{out}/{number:06d}.html"\n'
                    for number, line in enumerate(lines)
                )
            )
            most = str(min(concurrency, 300))
            return [
                "curl",
                "-sS",
                "--no-progress-meter",
                "--parallel",
                "--parallel-max",
                most,
                "-K",
                str(config),
            ]
    raise ValueError(arm)


def is_installed(arm: str) -> bool:
    if arm == "scrapy":
        code = subprocess.run(
            [sys.executable, "-c", "import scrapy"], capture_output=True, check=False
        ).returncode
        return code == 0
    return shutil.which(arm) is not None


class Origin(msgspec.Struct, frozen=True):
    """A site that answers every path with one page. `pid` is None for bench/origin.py."""

    name: str
    url: str
    pid: int | None = None


@contextmanager
def running_cheap_origin() -> Iterator[Origin]:
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None:
        with running_origin(size_bytes=PAGE_BYTES, think_s=0.0) as url:
            yield Origin("bench/origin.py", url)
        return
    version = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=True).stderr
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        port = _free_port()
        (folder / "page.html").write_text(os.urandom(PAGE_BYTES // 2).hex())
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port))
        process = subprocess.Popen([nginx, "-c", f"{folder}/nginx.conf", "-p", str(folder)])
        stack.callback(process.wait)
        stack.callback(process.terminate)
        _wait_for(port)
        name = version.strip().rpartition(" ")[2]
        yield Origin(name, f"http://127.0.0.1:{port}", process.pid)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    import socket

    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError("the origin does not listen")
