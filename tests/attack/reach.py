"""Attacks through the server's fetches: forbidden addresses, and secrets sent elsewhere."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack

from tests.attack.origin import Site, serve
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running

# IPv6 addresses that embed 127.0.0.1 or 169.254.169.254, or that are not public.
WRAPPED = (
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:7f00:1",
    "::ffff:0:a9fe:a9fe",
    "::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe",
    "2002:a9fe:a9fe::",
    "2002:7f00:1::1",
    "2001:0:a9fe:a9fe::",
    "2001:0:4136:e378:8000:63bf:5601:5601",
    "::5efe:7f00:1",
    "2a01::5efe:a9fe:a9fe",
    "2a01::200:5efe:7f00:1",
    "100:0:0:1::1",
    "4000::1",
    "6000::1",
    "fe00::1",
    "fc00::1",
    "fe80::1",
    "64:ff9b:1:a9fe:a9:fe00::",
    "64:ff9b:1::a9:fea9:fe00:0",
    "2a01:db8:a9fe:a9fe::",
    "2a01:db8:1:2:a9:fea9:fe00:0",
    "2001:0:808:808::5601:5601",
    "2a01::100:5efe:7f00:1",
    "2a01::300:5efe:7f00:1",
    "3ffe::1",
    "3fff::1",
    "fec0::1",
    "ff02::1",
    "::ffff:224.0.0.1",
)


def wrapped_addresses(ground: Ground, report: Report) -> None:
    """Fetches IPv6 addresses that embed a private IPv4 address, directly and through redirects,
    and records every socket with strace."""
    trace = ground.folder / "connects"
    ground.folder.mkdir(parents=True, exist_ok=True)
    # -D: the server stays the child process, so that it can be ended. strace only watches it.
    prefix = ("strace", "-D", "-f", "-qq", "-e", "trace=connect", "-o", str(trace))
    target = Target(ground.python, ground.folder, dict(ground.arena.environ), prefix=prefix)
    site = Site(ground.arena.origin_address)
    with serve(site, ground.arena.port), running(target):
        ways = [site.url(f"/redirect?to=http://[{address}]/&status=302") for address in WRAPPED]
        target.wait_ended(target.submit(ways), deadline_s=60)
        for number, address in enumerate(WRAPPED):
            body = {"tasks": [{"url": f"http://[{address}]/{number}"}], "on_invalid": "skip"}
            answer = target.call("POST", "/v1/jobs", json=body)
            if answer.status_code == 201:
                target.wait_ended(answer.json()["job_id"], deadline_s=20)
        time.sleep(0.5)
        connects = set(re.findall(r'inet_pton\(AF_INET6, "([^"]+)"', trace.read_text()))
        report.equals("sockets opened to these addresses", len(connects), 0)


def redirects_with_secrets(ground: Ground, report: Report) -> None:
    """A page redirects a request that carries secret headers to another origin."""
    with ExitStack() as stack:
        honest = stack.enter_context(serve(Site(ground.arena.victim_address), ground.arena.port))
        hostile = stack.enter_context(serve(Site(ground.arena.origin_address), ground.arena.port))
        target = stack.enter_context(
            running(Target(ground.python, ground.folder, dict(ground.arena.environ)))
        )
        secrets = {
            "X-Api-Key": "secret-1",
            "X-Auth-Token": "secret-2",
            "Cookie": "secret-3",
            "Authorization": "Bearer secret-4",
            "Cookie2": "secret-5",
            "X-Amz-Security-Token": "secret-6",
            "X-Anything": "secret-7",
            "Referer": "http://example.com/secret-8?token=secret-9",
        }
        there = hostile.url("/echo")
        urls = [honest.url(f"/redirect?to={there}&status={n}") for n in (301, 302, 303, 307, 308)]
        # A redirect within the first origin, and then to the other one.
        urls.append(honest.url(f"/redirect?to=/redirect?to={there}"))
        tasks = [{"url": url} for url in urls]
        tasks += [{"url": url, "method": "POST", "body": "secret-10"} for url in urls]
        params = {"custom_headers": secrets}
        answer = target.call("POST", "/v1/jobs", json={"tasks": tasks, "zenrows_params": params})
        target.wait_ended(answer.json()["job_id"], deadline_s=60)
        seen = b"".join(request.head + request.body for request in hostile.requests)
        report.equals("secrets that reached the other origin", seen.count(b"secret-"), 0)
