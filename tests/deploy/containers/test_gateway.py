"""Tests the image of the gateway with the restrictions of the compose file."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import yaml

from tests.deploy.containers.stage import GATEWAY_IMAGE, NAME, ULIMITS, until
from tests.deploy.templates import ROOT
from tests.servers import free_port

BOX = ROOT / "deploy" / "box"
# Only a browser can produce the text of this page.
PAGE = b"<html><body><script>document.write('rendered: ' + 6 * 7)</script></body></html>"


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@contextmanager
def a_gateway(*options: str, **environ: str) -> Iterator[tuple[str, httpx.Client]]:
    """Runs a container with the restrictions of the compose file, some replaced by `options`.
    Yields its name and a client."""
    service = yaml.safe_load((BOX / "compose.yaml").read_text())["services"]["gateway"]
    assert service["read_only"]
    assert service["init"]
    port, name = free_port(), f"{NAME}gateway-{free_port()}"
    only_here = {"CONVEYOR_PORT": str(port), "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on", **environ}
    command = [
        *("podman", "--runtime", "runc", "run", "--detach", "--name", name, "--network", "host"),
        *("--init", "--read-only", "--read-only-tmpfs=false", *ULIMITS),
        *(f"--tmpfs={item}" for item in service["tmpfs"]),
        *(f"--cap-drop={item}" for item in service["cap_drop"]),
        *(options or tuple(f"--security-opt={item}" for item in service["security_opt"])),
        *(f"--env={variable}={value}" for variable, value in only_here.items()),
    ]
    subprocess.run([*command, GATEWAY_IMAGE], cwd=BOX, check=True, capture_output=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=170) as client:
            until("the gateway to be ready", lambda: _is_ready(client))
            yield name, client
    finally:
        subprocess.run(["podman", "rm", "-f", "-t", "0", name], capture_output=True, check=False)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _render(client: httpx.Client, url: str) -> str:
    query = {"apikey": "any-key", "url": url, "js_render": "true"}
    answer = client.get("/v1/", params=query)
    assert answer.status_code == 200, answer.text
    return answer.text


def _inside(name: str, *command: str) -> str:
    ended = subprocess.run(
        ["podman", "exec", name, *command], capture_output=True, text=True, check=True
    )
    return ended.stdout


def test_a_page_is_rendered_in_the_sandbox_of_chromium(page_url: str) -> None:
    with a_gateway() as (name, client):
        rendered = _render(client, page_url)
        processes = _inside(name, "sh", "-c", "cat /proc/[0-9]*/cmdline")
        _inside(name, "conveyor", "health")

    assert "rendered: 42" in rendered
    assert "--type=renderer" in processes
    assert "--no-sandbox" not in processes


def test_without_user_namespaces_a_page_is_rendered_without_the_sandbox(page_url: str) -> None:
    default = "--security-opt=no-new-privileges:true"

    with a_gateway(default, CONVEYOR_CHROMIUM_SANDBOX="off") as (_, client):
        rendered = _render(client, page_url)

    assert "rendered: 42" in rendered


def test_the_check_names_the_remedy_if_the_default_profile_stops_chromium() -> None:
    with a_gateway("--security-opt=no-new-privileges:true") as (name, _):
        ended = subprocess.run(
            ["podman", "exec", name, "conveyor", "check"],
            capture_output=True,
            text=True,
            check=False,
        )

    assert ended.returncode == 1
    assert "chromium does not start" in ended.stdout
    assert "CONVEYOR_CHROMIUM_SANDBOX=off" in ended.stdout
