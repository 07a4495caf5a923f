"""Tests the compose file of deploy/box: Conveyor behind Caddy with TLS, started as an operator
does.

The image of Caddy is built from Debian's package, because there may be no registry.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.containers.stage import GATEWAY_IMAGE, IMAGE, TOOLS, until
from tests.deploy.templates import ROOT
from tests.servers import free_ports

BOX = ROOT / "deploy" / "box"
KEY = "a-key-of-the-compose-test"
# The official image runs this command with these variables.
CADDY = """
FROM localhost/python-base:test
COPY caddy /usr/bin/caddy
ENV XDG_CONFIG_HOME=/config XDG_DATA_HOME=/data
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
"""
# podman needs runc and the limits on machines without systemd. netavark resolves the names of
# services.
CONTAINERS = """
[containers]
default_ulimits = ["nofile=10000:10000", "nproc=10000:10000"]
[engine]
runtime = "runc"
[network]
network_backend = "netavark"
"""


@dataclass(frozen=True, slots=True)
class Box:
    environ: dict[str, str]
    url: str
    trusted: ssl.SSLContext

    def compose(self, *arguments: str) -> None:
        command = [str(TOOLS / "podman-compose"), "-f", str(BOX / "compose.yaml"), *arguments]
        ended = subprocess.run(
            command, env=self.environ, cwd=BOX, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        with httpx.Client(verify=self.trusted, headers={"X-API-Key": key}, timeout=30) as client:
            return client.get(f"{self.url}{path}")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with httpx.Client(verify=self.trusted, headers={"X-API-Key": KEY}, timeout=30) as client:
            return client.post(f"{self.url}{path}", json=body)

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("box")
    (folder / "containers.conf").write_text(CONTAINERS)
    plain, tls = free_ports(2)
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "COMPOSE_PROJECT_NAME": f"conveyor-test-{tls}",
        "IMAGE": IMAGE,
        "GATEWAY_IMAGE": GATEWAY_IMAGE,
        "COMPOSE_PROFILES": "gateway",
        "CONVEYOR_RENDERER_URL": "http://gateway:8080/v1/?apikey=any-key",
        "CADDY_IMAGE": _make_caddy_image(folder),
        "DOMAIN": "localhost",
        "HTTP_PORT": str(plain),
        "HTTPS_PORT": str(tls),
        "CONVEYOR_API_KEYS": KEY,
    }
    # For localhost Caddy issues certificates with its own authority, which is not trusted here.
    trusted = ssl.create_default_context()
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    box = Box(environ, f"https://localhost:{tls}", trusted)
    try:
        box.compose("up", "--detach", "--no-build")
        until("the service to be ready behind Caddy", box.is_ready)
        yield box
    finally:
        box.compose("down", "--volumes", "--timeout", "0")


def _make_caddy_image(folder: Path) -> str:
    program = shutil.which("caddy")
    assert program is not None, "caddy is not installed: make test-deploy does"
    context = folder / "caddy"
    context.mkdir()
    shutil.copy(program, context / "caddy")
    (context / "Dockerfile").write_text(CADDY)
    image = "localhost/caddy:test"
    build = ["buildah", "bud", "--isolation", "chroot", "--format", "docker", "-t", image]
    limits = ["--ulimit", "nofile=10000:10000", "--ulimit", "nproc=10000:10000"]
    subprocess.run([*build, *limits, str(context)], check=True, capture_output=True)
    return image


def test_the_right_key_is_served_and_a_wrong_one_is_refused(box: Box) -> None:
    keys = (KEY, "another-key-0123456789")

    assert [box.get("/v1/jobs", key).status_code for key in keys] == [200, 401]


def test_pages_for_operators_are_not_served_to_the_public(box: Box) -> None:
    assert [box.get(path).status_code for path in ("/metrics", "/debug/actors")] == [404, 404]


def test_the_service_can_connect_to_the_rendering_gateway(box: Box) -> None:
    ask = "from urllib.request import urlopen; urlopen('http://gateway:8080/readyz')"

    box.compose("exec", "-T", "conveyor", "python3", "-c", ask)
    job = {"tasks": [{"url": "https://example.com/"}], "zenrows_params": {"js_render": "true"}}
    answer = box.post("/v1/jobs?dry_run=true", job)

    assert answer.status_code == 200, answer.text


def test_jobs_survive_a_restart_and_a_recreation_of_the_containers(box: Box) -> None:
    body = {"tasks": [{"url": "http://example.invalid/"}], "status": "open", "name": "kept"}
    job_id = box.post("/v1/jobs", body).json()["job_id"]
    before = box.get(f"/v1/jobs/{job_id}").json()

    box.compose("restart", "--timeout", "120", "conveyor")
    until("the service to be ready again", box.is_ready)
    after = box.get(f"/v1/jobs/{job_id}").json()
    box.compose("down", "--timeout", "120")
    box.compose("up", "--detach", "--no-build")
    until("the service to be ready again", box.is_ready)
    recreated = box.get(f"/v1/jobs/{job_id}").json()

    for answer in (after, recreated):
        assert {name: answer[name] for name in ("job_id", "name", "created_at", "status")} == {
            name: before[name] for name in ("job_id", "name", "created_at", "status")
        }
        assert answer["latest_run"]["stats"]["total"] == 1
