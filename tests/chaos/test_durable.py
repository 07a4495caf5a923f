"""Tests with strace that a job is synced to disk before its POST is answered."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.programs import Process, Server, a_site, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

SYNCED = re.compile(r"fdatasync.*= 0|fsync.*= 0")


def test_a_job_is_synced_to_disk_before_its_post_is_answered(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", launch=_trace)
    with a_site() as site:
        server.start()
        try:
            body = {"tasks": [{"url": url} for url in site.urls(3)]}
            assert server.call("POST", "/v1/jobs", json=body).status_code == 201
            lines = until("the trace", lambda: _promises_in(tmp_path / "trace"))
        finally:
            server.kill()

    last_submit = max(n for n, line in enumerate(lines) if '"POST /v1/jobs' in line)
    assert [line for line in lines[last_submit:-1] if SYNCED.search(line)], lines[last_submit:]


def _trace(module: str, arguments: Sequence[str], environ: dict[str, str], log: Path) -> Process:
    """Starts the program with strace as its grandchild, so that strace ends with the program."""
    calls = "trace=fsync,fdatasync,recvfrom,recvmsg,sendto,sendmsg"
    trace = ["strace", "-D", "-f", "-qq", "-s", "24", "-e", calls, "-o", str(log.parent / "trace")]
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [*trace, sys.executable, "-m", module, *arguments],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def _promises_in(trace: Path) -> list[str] | None:
    """Returns the lines of the trace up to the first response 201."""
    lines = trace.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if '"HTTP/1.1 201' in line:
            return lines[: number + 1]
    return None
