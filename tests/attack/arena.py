"""Prepares the network in which an attack runs.

Where the machine allows it, an attack runs in a separate network namespace with public addresses:
the server runs with its default policy, which refuses loopback and private targets, and no packet
leaves the namespace. Otherwise it runs on loopback, with a policy that allows private targets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INSIDE = "CONVEYOR_ATTACK_ARENA"
# Public addresses for the default policy. No packet for them leaves the namespace.
ORIGIN_V4, VICTIM_V4, GATEWAY_V4 = "93.184.216.34", "93.184.216.35", "93.184.216.36"
# A name server that receives every query and answers none.
SILENT_DNS = "127.0.0.53"
SITE_NAMES_COUNT = 200


@dataclass(frozen=True, slots=True)
class Arena:
    """The addresses and host names of the sites, and the environment that the server needs."""

    origin_address: str
    victim_address: str
    gateway_address: str
    port: int | None
    has_names: bool
    environ: dict[str, str]

    def victim_host(self, number: int) -> str:
        """Returns a host name of the victim's site that no scenario has resolved yet."""
        return f"v{number}.victim.test" if self.has_names else self.victim_address

    def origin_host(self, number: int) -> str:
        return f"h{number}.hostile.test" if self.has_names else self.origin_address


LOOPBACK = Arena(
    origin_address="127.0.0.2",
    victim_address="127.0.0.3",
    gateway_address="127.0.0.4",
    port=None,
    has_names=False,
    environ={"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"},
)
NAMESPACE = Arena(
    origin_address=ORIGIN_V4,
    victim_address=VICTIM_V4,
    gateway_address=GATEWAY_V4,
    port=80,
    has_names=True,
    environ={},
)


def can_make_namespace() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    command = ["unshare", "--net", "--mount", "ip", "link", "set", "lo", "up"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_inside(arguments: Sequence[str]) -> int:
    """Runs this package in a child process, in a namespace if one can be created."""
    command = [sys.executable, "-m", "tests.attack", *arguments]
    mode = "loopback"
    if can_make_namespace():
        command = ["unshare", "--net", "--mount", "--", *command]
        mode = "namespace"
    return subprocess.run(command, env={**os.environ, INSIDE: mode}, check=False).returncode


def enter() -> Arena:
    """Prepares the network of this process and returns it. Called once, in the child."""
    if os.environ[INSIDE] == "loopback":
        return LOOPBACK
    _run("ip", "link", "set", "lo", "up")
    for address in (ORIGIN_V4, VICTIM_V4, GATEWAY_V4):
        _run("ip", "address", "add", f"{address}/32", "dev", "lo")
    folder = Path(tempfile.mkdtemp(prefix="conveyor-attack-"))
    hosts = ["127.0.0.1 localhost"]
    hosts += [f"{ORIGIN_V4} h{number}.hostile.test" for number in range(SITE_NAMES_COUNT)]
    hosts += [f"{VICTIM_V4} v{number}.victim.test" for number in range(SITE_NAMES_COUNT)]
    _replace(folder / "hosts", "\n".join(hosts) + "\n", "/etc/hosts")
    _replace(folder / "resolv.conf", f"nameserver {SILENT_DNS}\n", "/etc/resolv.conf")
    return NAMESPACE


def _replace(file: Path, text: str, place: str) -> None:
    """Mounts `file` over `place` in this mount namespace."""
    file.write_text(text)
    _run("mount", "--bind", str(file), os.path.realpath(place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
