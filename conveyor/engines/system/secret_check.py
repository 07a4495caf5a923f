"""The secret check: a sealed text beside the data tells at a start that the secret is another one.

With another secret no sealed header or key opens, every caller has another name, and so nobody
finds their jobs: a process that was started so must not serve (SPEC.md 5.3).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from conveyor.engines.system.vault import keep_once
from conveyor.ports.vault import Vault, WrongSecret, make_check, opens_check

log = logging.getLogger(__name__)

CHECK_FILE = "secret.check"


def check_secret(data_dir: Path, vault: Vault) -> None:
    """WrongSecret when the data directory was sealed with another; the first start makes the
    check."""
    path = data_dir / CHECK_FILE
    check = _read(path) or _make(path, vault)
    if check is not None and not opens_check(vault, check):
        raise WrongSecret(
            f"{data_dir} was sealed with another secret key: set CONVEYOR_SECRET_KEY to the one "
            "that it was made with (without it, put back its secret.key), or choose another "
            "directory with CONVEYOR_DATA_DIR"
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None


def _make(path: Path, vault: Vault) -> str | None:
    """What the file holds now; None where there is no room for it, as on a full disk."""
    try:
        keep_once(path, make_check(vault))
        return _read(path)
    except OSError as error:
        log.warning("no secret check was made", extra={"path": str(path), "cause": str(error)})
        return None


def refuse_lost_secret(data_dir: Path) -> None:
    """WrongSecret when data was sealed with a secret.key that is gone: a new one would not open
    it."""
    if (data_dir / CHECK_FILE).exists() and not os.path.lexists(data_dir / "secret.key"):
        raise WrongSecret(
            f"{data_dir / 'secret.key'} is missing, and the data was sealed with another secret: "
            "put it back, or set CONVEYOR_SECRET_KEY to the secret key that it was made with"
        )
