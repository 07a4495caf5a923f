"""Inspection: a running process serves a snapshot of its state over a local socket
(docs/operations.md, Endpoints for operators).

The socket is in the data directory and belongs to the owner of the directory. Each connection gets
one snapshot as JSON. `conveyor ps` reads it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from actors.runtime import Node
from conveyor.domain.errors import ConveyorError

# The path of a Unix socket is limited to about 108 bytes on Linux and 104 on macOS.
PATH_BYTES_MAX = 100
READ_S = 5.0


class NotRunning(ConveyorError):
    """No running process serves this data directory."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One live run, for display."""

    job_id: str
    run_id: str
    status: str
    total: int
    completed: int
    successful: int
    failed: int
    waiting_on: str | None = None
    waiting_detail: str | None = None
    eta_s: float | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    role: str
    version: str
    inflight: int
    capacity: int
    tree: Node
    runs: list[RunLine]


def socket_path(data_dir: Path) -> Path:
    """Returns the path of the socket: in the data directory, unless that path is too long."""
    path = data_dir.resolve() / "ps.sock"
    if len(bytes(path)) <= PATH_BYTES_MAX:
        return path
    digest = hashlib.sha256(bytes(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"conveyor-{digest}.sock"


async def serve_snapshots(
    data_dir: Path,
    take: Callable[[], Awaitable[Snapshot]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answers every connection with a new snapshot until it is cancelled."""
    path = socket_path(data_dir)
    path.unlink(missing_ok=True)
    listening = _bind_privately(path)
    listening.listen()

    async def answer(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(msgspec.json.encode(await take()))
            await stream.aclose()

    try:
        task_status.started()
        await trio.serve_listeners(answer, [trio.SocketListener(listening)])
    finally:
        path.unlink(missing_ok=True)


def _bind_privately(path: Path) -> trio.socket.SocketType:
    """Binds a socket that only the owner can use. The umask sets its mode at creation, so that
    there is no moment with wider permissions, as with a later chmod.
    """
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        plain.bind(str(path))
    except BaseException:
        plain.close()
        raise
    finally:
        os.umask(before)
    plain.setblocking(False)
    return trio.socket.from_stdlib_socket(plain)


def read_snapshot(data_dir: Path) -> Snapshot:
    """Returns the snapshot of the owner of the directory. Raises NotRunning."""
    pieces: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(READ_S)
        try:
            connection.connect(str(socket_path(data_dir)))
            while piece := connection.recv(65536):
                pieces.append(piece)
        except OSError as error:
            raise NotRunning(
                f"Nothing is running on {data_dir}. Start `conveyor dev` there, or "
                "point CONVEYOR_DATA_DIR at where it runs. `conveyor ps FOLDER` shows a scrape."
            ) from error
    return msgspec.json.decode(b"".join(pieces), type=Snapshot)
