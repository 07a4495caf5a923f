"""Attacks on the HTTP server: ambiguous framing, idle connections, refused bodies, bad input."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from tests.attack.origin import Site, serve
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
AMBIGUOUS = {
    "Content-Length with Transfer-Encoding": b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "equal Content-Lengths": b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a folded header": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
    "a bare line feed": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "an unknown version": b"GET /healthz HTTP/3.7\r\nHost: x\r\n\r\n",
    "gzip, chunked": b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk size": b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


def _target(ground: Ground) -> Target:
    return Target(ground.python, ground.folder, dict(ground.arena.environ))


def _exchange(target: Target, sent: bytes, wait_s: float = 5.0) -> tuple[bytes, bool]:
    """Returns the bytes received within `wait_s`, and whether the server closed the connection."""
    received = b""
    with socket.create_connection(target.address) as connection:
        connection.settimeout(wait_s)
        try:
            connection.sendall(sent)
            while data := connection.recv(65536):
                received += data
        except TimeoutError:
            return received, False
        except ConnectionError:
            return received, True
    return received, True


def ambiguous_framing(ground: Ground, report: Report) -> None:
    """Sends requests whose end two HTTP parsers would find in different places."""
    with running(_target(ground)) as target:
        for name, sent in AMBIGUOUS.items():
            received, is_closed = _exchange(target, sent)
            is_refused = received.startswith(b"HTTP/1.1 400") and b"problem+json" in received
            answers = received.count(b"HTTP/1.1 ")
            report.equals(f"{name}: 400 with a problem", float(is_refused), 1)
            report.equals(f"{name}: responses", answers, 1)
            report.equals(f"{name}: connection closed", float(is_closed), 1)


def idle_http2(ground: Ground, report: Report) -> None:
    """Opens a connection, sends the HTTP/2 preface and then nothing."""
    with running(_target(ground)) as target:
        _, is_closed = _exchange(target, H2_PREFACE, wait_s=10)
        report.equals("closed within 10 s", float(is_closed), 1)


def refused_long_body(ground: Ground, report: Report) -> None:
    """Sends a body of 9 MB that the server refuses early, and then a SIGTERM to the server."""
    with running(_target(ground)) as target:
        body = b'{"tasks":[' + b'"",' * 3_000_000
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nX-API-Key: a\r\n"
        head += b"Content-Type: application/json\r\n"
        connection = socket.create_connection(target.address)
        connection.settimeout(15)
        is_closed = False
        try:
            connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while connection.recv(65536):
                pass
            is_closed = True
        except TimeoutError:
            is_closed = False
        except ConnectionError:
            is_closed = True
        report.equals("connection closed within 15 s", float(is_closed), 1)
        held = socket.create_connection(target.address)
        held.sendall(head + b"Content-Length: 1000000\r\n\r\n" + b'{"tasks":[' + b'"",' * 1000)
        time.sleep(0.5)
        report.at_most("seconds from SIGTERM to the end", target.terminate(30), 30)
        held.close()
        connection.close()


def memory_used_up(ground: Ground, report: Report) -> None:
    """Serves pages of 20 MiB to a process with a limit of 420 MB of address space."""

    class Heavy(Site):
        async def _behave(self, name: str, request: object, stream: object) -> bool:
            size = 20 << 20
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {size}\r\n\r\n"
            await stream.send_all(head.encode() + os.urandom(1 << 20) * 20)  # type: ignore[attr-defined]
            return True

    site = Heavy(ground.arena.victim_address)
    limit = ("prlimit", "--as=420000000")
    target = Target(ground.python, ground.folder, dict(ground.arena.environ), prefix=limit)
    with serve(site, ground.arena.port), running(target):
        target.submit([site.url(f"/page/{n}") for n in range(60)])
        time.sleep(15)
        # A process that runs out of memory has 10 s to end, from any moment of the sleep.
        give_up_at = time.monotonic() + 20
        while not (is_well := _serves(target) or _has_exited(target)):
            if time.monotonic() >= give_up_at:
                break
            time.sleep(0.5)
        report.equals("serves or has exited", float(is_well), 1)
        if not _has_exited(target):
            report.at_most("seconds from SIGTERM to the end", target.terminate(30), 30)


def _has_exited(target: Target) -> bool:
    assert target.process is not None
    return target.process.poll() is not None


def _serves(target: Target) -> bool:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    try:
        received, _ = _exchange(target, request)
    except OSError:
        return False
    return received.startswith(b"HTTP/1.1 200")


def misspelt_parameters(ground: Ground, report: Report) -> None:
    """`rerun?statuses=failed` and `?dryrun=true` are misspelt: ignoring the parameter would start a
    full, billed run."""
    site = Site(ground.arena.victim_address)
    with serve(site, ground.arena.port), running(_target(ground)) as target:
        job_id = target.submit([site.url("/page/1")])
        target.wait_ended(job_id)
        rerun = target.call("POST", f"/v1/jobs/{job_id}/rerun?statuses=failed", json={})
        report.equals("status of rerun?statuses=failed", rerun.status_code, 400)
        tasks = {"tasks": [{"url": site.url("/page/2")}]}
        submit = target.call("POST", "/v1/jobs?dryrun=true", json=tasks)
        report.equals("status of jobs?dryrun=true", submit.status_code, 400)
        doubled = b'{"tasks":[],"tasks":[{"url":"%s"}]}' % site.url("/page/3").encode()
        answer = target.call(
            "POST", "/v1/jobs", content=doubled, headers={"Content-Type": "application/json"}
        )
        report.equals("status of a doubled JSON key", answer.status_code, 400)


def links_from_the_host_header(ground: Ground, report: Report) -> None:
    """Sends a Host header and an X-Forwarded-Host header that name another machine."""
    site = Site(ground.arena.victim_address)
    target = _target(ground)
    target.environ["CONVEYOR_PUBLIC_URL"] = "https://scrape.example"
    with serve(site, ground.arena.port), running(target):
        job_id = target.submit([site.url("/page/1")])
        target.wait_ended(job_id)
        headers = {"Host": "evil.test", "X-Forwarded-Host": "evil.test"}
        answer = target.call("GET", f"/v1/jobs/{job_id}/results", headers=headers)
        link = json.loads(answer.text)["results"][0]["result_url"]
        report.equals(
            "links begin with the public URL", float(link.startswith("https://scrape.example/")), 1
        )


def modules_in_the_working_directory(ground: Ground, report: Report) -> None:
    """Puts a file with the name of a dependency into the program's working directory."""
    site = Site(ground.arena.victim_address)
    target = _target(ground)
    target.arguments = ("--processes", "2")
    ground.folder.mkdir(parents=True, exist_ok=True)
    proof = ground.folder / "executed"
    (ground.folder / "msgspec.py").write_text(f"open({str(proof)!r}, 'w')\nraise SystemExit(3)\n")
    with serve(site, ground.arena.port), running(target):
        job_id = target.submit([site.url(f"/page/{n}") for n in range(20)])
        target.wait_ended(job_id)
        time.sleep(3)
        report.equals("the file was executed", float(Path(proof).exists()), 0)
