"""Attacks on the disk: a full volume, damaged files, space that is not freed, wrong permissions."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import httpx
import trio

from tests.attack.origin import Request, Site, serve
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running
from tests.attack.volume import small_volume

BODY_BYTES = 900_000


class Incompressible(Site):
    """A site whose pages are 900 KB of random bytes."""

    async def _behave(self, name: str, request: Request, stream: trio.SocketStream) -> bool:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
        await stream.send_all(head.encode() + os.urandom(BODY_BYTES))
        return True


def full_volume(ground: Ground, report: Report) -> None:
    """The data directory is on a volume of 96 MB, which pages and then a file fill."""
    site = Incompressible(ground.arena.victim_address)
    target = Target(ground.python, ground.folder, dict(ground.arena.environ))
    with small_volume(target.data_dir, 96), serve(site, ground.arena.port), running(target):
        job_id = target.submit([site.url(f"/page/{n}") for n in range(200)])
        time.sleep(8)
        fetched = sum(site.request_counts.values())
        run = target.run_of(job_id)
        report.equals("tasks failed because of the full disk", run["stats"]["failed"], 0)
        time.sleep(4)
        report.at_most(
            "further fetches while it is full", sum(site.request_counts.values()) - fetched, 10
        )
        filler = target.data_dir / "filler"
        # Unbuffered, because flushing a buffer would fail again when the file is closed.
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 65536):
                pass
        deleted = target.call("DELETE", f"/v1/jobs/{job_id}")
        report.equals("status of DELETE on the full disk", deleted.status_code, 202)
        filler.unlink()
        time.sleep(ground.choose(20, 60))
        used = os.statvfs(target.data_dir)
        used_mb = (used.f_blocks - used.f_bfree) * used.f_frsize / 1e6
        report.at_most("megabytes used a minute after the delete", used_mb, 45)
        again = target.submit([site.url(f"/page/{n}") for n in range(5)])
        report.at_most("seconds of a new job", target.wait_ended(again), 60)
        target.end()


def open_directory(ground: Ground, report: Report) -> None:
    """The data directory exists before the start, and all users may read it."""
    target = Target(ground.python, ground.folder, dict(ground.arena.environ))
    target.data_dir.mkdir(parents=True)
    target.data_dir.chmod(0o755)
    with running(target):
        target.submit([f"http://{ground.arena.victim_address}/page/1"])
        paths = [target.data_dir, *target.data_dir.rglob("*")]
        shared = [path for path in paths if path.stat().st_mode & 0o077 and not path.is_symlink()]
        private_dir = not target.data_dir.stat().st_mode & 0o077
        report.equals("the directory is private", float(private_dir), 1)
        report.equals("files that others may read", len([p for p in shared if p.is_file()]), 0)


def another_secret(ground: Ground, report: Report) -> None:
    """The server starts with another secret key than the one that sealed the data."""
    target = Target(ground.python, ground.folder, dict(ground.arena.environ))
    with running(target):
        target.submit([f"http://{ground.arena.victim_address}/page/1"])
    target.environ["CONVEYOR_SECRET_KEY"] = "another-secret-key-of-more-than-32-characters"
    refused = False
    try:
        target.start()
        target.end()
    except AssertionError:
        refused = True
    text = target.log.read_text()
    report.equals("the start is refused", float(refused), 1)
    report.equals("tracebacks", text.count("Traceback"), 0)


def damaged_bodies(ground: Ground, report: Report) -> None:
    """One bit of the stored bodies is flipped, and their end is cut off."""
    site = Site(ground.arena.victim_address)
    target = Target(ground.python, ground.folder, dict(ground.arena.environ))
    with serve(site, ground.arena.port), running(target):
        job_id = target.submit([site.url(f"/page/{n}") for n in range(6)])
        target.wait_ended(job_id)
        run_id = target.run_of(job_id)["run_id"]
        sound = target.bodies_of(job_id)
        for pack in (target.data_dir / "blobs").rglob("pack.,*"):
            content = bytearray(pack.read_bytes())
            content[3] ^= 1
            pack.write_bytes(content[: len(content) - 2])
        page = target.call("GET", f"/v1/jobs/{job_id}/results?limit=100").json()
        wrong = 0
        for result in page["results"]:
            link = result["result_url"].partition("/v1/")[2]
            answer = _answer(target, f"/v1/{link}")
            wrong += answer is not None and answer != sound[result["url"]]
        report.equals("bodies that were served with other bytes", wrong, 0)
        path = f"/v1/jobs/{job_id}/runs/{run_id}/exports"
        export_id = target.call("POST", path).json()["export_id"]
        started_at, seconds, export = time.monotonic(), None, {}
        while seconds is None and time.monotonic() < started_at + 30:
            export = target.call("GET", f"{path}/{export_id}").json()
            if export["status"] == "failed":
                seconds = time.monotonic() - started_at
            time.sleep(0.1)
        report.at_most("seconds until the export has failed", seconds, 10)
        report.equals("its error names a task", float("task" in (export.get("error") or "")), 1)


def _answer(target: Target, path: str) -> str | None:
    """Returns the body of a response with status 200; otherwise None."""
    try:
        answer = target.call("GET", path)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


def damaged_database(ground: Ground, report: Report) -> None:
    """Pages of the database are overwritten while the server runs."""
    target = Target(ground.python, ground.folder, dict(ground.arena.environ))
    target.start()
    urls = [f"http://{ground.arena.victim_address}/page/{n}" for n in range(3000)]
    job_id = target.submit(urls, metadata={"text": "x" * 400})
    target.terminate(60)  # The last connection to close copies the WAL into the database.
    target.start()
    database = target.data_dir / "conveyor.db"
    with database.open("r+b") as file:
        file.seek(40960)
        file.write(os.urandom(max(0, database.stat().st_size - 45056)))
    for number in range(20):
        target.call("GET", f"/v1/jobs/{job_id}/results?limit=100")
        target.call("GET", f"/v1/jobs/{job_id}?n={number}")
    report.equals("status of /readyz", target.call("GET", "/readyz").status_code, 503)
    log_lines = [line for line in target.log_lines() if line.get("level") in {"error", "critical"}]
    damaged = [line for line in log_lines if "damaged" in line["message"]]
    report.equals("errors in the log that name the damage", len(damaged), 1)
    target.end()
