"""Tests SIGTERM in a container, as process 1 and under an init, serving and starting."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.containers.stage import IMAGE, NAME, ULIMITS, until
from tests.servers import free_port

TERMINATED = 128 + 15
# A process that ignores the signal is killed after this time, with status 137.
KILL_S = 60


@contextmanager
def a_container(*options: str) -> Iterator[str]:
    """Starts a container with the role `dev`. Yields its name without waiting for it."""
    name = f"{NAME}signals-{free_port()}"
    environ = {
        "CONVEYOR_ROLE": "dev",
        "CONVEYOR_PORT": str(free_port()),
        "CONVEYOR_HOST": "127.0.0.1",
    }
    variables = [f"--env={variable}={value}" for variable, value in environ.items()]
    command = [
        "podman",
        "--runtime",
        "runc",
        "run",
        "--detach",
        "--name",
        name,
        "--network",
        "host",
    ]
    limits = ["--read-only", "--cap-drop", "all", *ULIMITS, "--volume", "/data"]
    subprocess.run(
        [*command, *limits, *options, *variables, IMAGE], check=True, capture_output=True
    )
    try:
        yield name
    finally:
        subprocess.run(
            ["podman", "rm", "-f", "-v", "-t", "0", name], capture_output=True, check=False
        )


def stop(name: str) -> int:
    """Sends SIGTERM and returns the exit status."""
    subprocess.run(["podman", "stop", "--time", str(KILL_S), name], check=True, capture_output=True)
    return int(state(name)["ExitCode"])


def state(name: str) -> dict[str, int]:
    process = subprocess.run(["podman", "inspect", name], capture_output=True, check=True)
    (facts,) = json.loads(process.stdout)
    container_state: dict[str, int] = facts["State"]
    return container_state


def handles_signals(name: str) -> bool:
    """Returns whether process 1 has a handler for SIGTERM. Without one it ignores the signal."""
    lines = Path(f"/proc/{state(name)['Pid']}/status").read_text().splitlines()
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
    return bool(caught & 1 << 14)


def is_listening(name: str) -> bool:
    logs = subprocess.run(["podman", "logs", name], capture_output=True, text=True, check=False)
    return "is listening" in logs.stdout + logs.stderr


@pytest.mark.parametrize("options", [(), ("--init",)], ids=["process 1", "under an init"])
def test_a_serving_process_ends_with_0_on_sigterm(options: tuple[str, ...]) -> None:
    with a_container(*options) as name:
        until("the process to listen", lambda: is_listening(name))

        assert stop(name) == 0


def test_process_1_ends_on_sigterm_while_it_starts() -> None:
    with a_container() as name:
        until("the handler for SIGTERM", lambda: handles_signals(name))

        assert stop(name) in {TERMINATED, 0}


def test_a_process_under_an_init_ends_on_sigterm_while_it_starts() -> None:
    with a_container("--init") as name:
        assert stop(name) in {TERMINATED, 0}
