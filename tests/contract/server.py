"""A server for the SDK: a client, a site, a webhook receiver, a folder, and jobs created on
demand."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from zenrows.batch import (
    BatchAPIError,
    Rate,
)

QUICK = {"timeout": 60, "poll_interval": 0.05}
PAGES = 3
MISSING = 7
"""The page of the demo site that is not there."""


@dataclass
class ContractServer:
    """A client, a site to scrape, a webhook receiver and a folder; jobs are created on demand."""

    client: Any
    urls: list[str]
    receiver: str
    folder: Path
    other_key: str = "another"
    """The key of a caller without jobs."""

    def a_job(self) -> Any:
        """A job that has ended: some pages, and one that is missing."""
        job = self.client.submit_regular([*self.urls[:PAGES], self.urls[MISSING]])
        job.run.wait(**QUICK)
        return job

    def an_open_job(self) -> Any:
        return self.client.submit_open([self.urls[0]])

    def a_scheduled_job(self) -> Any:
        return self.client.submit_scheduled(Rate(every=1, unit="day"), self.urls[:1])

    @cached_property
    def job(self) -> Any:
        return self.a_job()

    @cached_property
    def run(self) -> Any:
        return next(iter(self.job.runs()))

    @cached_property
    def page(self) -> Any:
        return next(iter(self.job.run.results(status="successful")))

    @cached_property
    def export(self) -> Any:
        return self.run.start_export().wait(timeout=60, poll_interval=0.05)

    def a_path(self, name: str) -> Path:
        return self.folder / name

    def has_a_webhook(self, job: Any) -> bool:
        with suppress(BatchAPIError):
            return bool(job.get_webhook().url)
        return False

    def without_keys_in_rotation(self) -> Any:
        """An account with an active signing key and no candidate."""
        self.client.cancel_hmac_rotation()
        if self.client.list_hmac_keys().active is None:
            self.client.rotate_hmac_key()
        return self.client


class _Receiver(BaseHTTPRequestHandler):
    """Accepts any webhook."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def a_receiver() -> Iterator[str]:
    """Runs a server that accepts any webhook, and returns its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
        server.shutdown()
        thread.join()


def is_whole_zip(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return archive.testzip() is None and len(archive.namelist()) >= PAGES


def ids(things: Iterable[Any], name: str) -> set[str]:
    return {getattr(record, name) for record in things}
