"""The process ends: on a signal at any moment, and by a deadline when it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STUCK = """
import signal, sys, threading, time
from conveyor.cli import entry
entry.install_handlers()
entry.set_deadline(1)
print("stuck", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
# A tree whose actor is given up while another cannot be cancelled: what is left of the process
# would hold its data directory for ever.
ZOMBIE = """
import trio
from actors.runtime import Child, Intensity, Strategy, Supervisor
from conveyor.cli import entry, shutdown
entry.install_handlers()
shutdown.FAILED_STOP_S = 1

async def hang():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

async def fail():
    raise MemoryError

async def main():
    children = [
        Child("hung", run=hang, stop_grace_s=0.1),
        Child("failed", run=fail, intensity=Intensity(restarts_max=0)),
    ]
    supervisor = Supervisor("tree", strategy=Strategy.ONE_FOR_ONE, children=children)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shutdown.end_if_failed, supervisor)
        await supervisor.run()

trio.run(main)
"""

# Trio's own task fails, as on a MemoryError: whatever waits for a thread now waits for ever.
FAILED_LOOP = """
import trio
from conveyor.cli import entry, shutdown
entry.install_handlers()
shutdown.FAILED_STOP_S = 1

def fail():
    raise MemoryError

async def main():
    with trio.CancelScope(shield=True):
        trio.lowlevel.current_trio_token().run_sync_soon(fail)
        await trio.sleep_forever()

shutdown.run_command(main)
"""


@pytest.fixture
def in_namespace() -> tuple[str, ...]:
    """What makes a program process 1, where this machine allows it."""
    command = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    probe = subprocess.run([*command, "true"], check=False, capture_output=True)
    if probe.returncode != 0:
        pytest.skip("no process namespace can be made here")
    return command


def test_a_process_that_hangs_ends_by_its_deadline() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], check=False, capture_output=True, timeout=60
    )

    assert ended.returncode == 70
    assert b"did not end in time" in ended.stderr


def test_a_tree_that_failed_and_cannot_stop_ends_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ZOMBIE], check=False, capture_output=True, timeout=60
    )

    assert ended.returncode == 70


def test_a_failed_event_loop_ends_the_process_though_its_main_task_waits_for_ever() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAILED_LOOP], check=False, capture_output=True, timeout=60
    )

    assert ended.returncode == 70
    assert b"the event loop failed" in ended.stderr


def test_a_command_that_ends_in_order_sets_no_deadline() -> None:
    program = "import trio; from conveyor.cli import shutdown\n"
    program += "shutdown.run_command(trio.sleep, 0.01)\n"
    program += "import signal; raise SystemExit(signal.alarm(0))\n"

    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    assert ended.returncode == 0


def test_the_deadline_holds_in_process_1_of_a_container(in_namespace: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [*in_namespace, sys.executable, "-c", STUCK], check=False, capture_output=True, timeout=60
    )

    assert ended.returncode == 70


def test_a_sigterm_while_the_program_loads_ends_it(tmp_path: Path) -> None:
    loading = (
        "import os, signal, sys\n"
        "class Loading:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'conveyor.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Loading())\n"
        "from conveyor.cli.entry import main\n"
        "main()\n"
    )
    environ = {**os.environ, "CONVEYOR_DATA_DIR": str(tmp_path)}

    ended = subprocess.run(
        [sys.executable, "-c", loading], check=False, capture_output=True, timeout=60, env=environ
    )

    assert ended.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_does_not_change_the_exit_status(number: int) -> None:
    # An object of a module is deleted when the interpreter has removed its signal handlers.
    ending = (
        "import os, sys\n"
        "from conveyor.cli import entry\n"
        "class Late:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, {int(number)})\n"
        "late = Late()\n"
        "entry.install_handlers()\n"
        "sys.exit(7)\n"
    )

    ended = subprocess.run([sys.executable, "-c", ending], check=False, timeout=60)

    assert ended.returncode == 7


def test_the_program_is_entered_where_signals_are_handled_first() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")

    assert 'conveyor = "conveyor.cli.entry:main"' in text
