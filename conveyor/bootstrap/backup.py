"""Backup and restoration of the embedded engine, for the command line."""

from __future__ import annotations

from pathlib import Path

from conveyor.config import BadSettings, Settings
from conveyor.engines.sqlite import backup
from conveyor.engines.sqlite.backup import Manifest

__all__ = ["Manifest", "back_up", "restore"]

EMBEDDED = "embedded"


def back_up(settings: Settings, target: Path) -> Manifest:
    """Copies the data directory of these settings, which may be in use. Raises BackupFailed."""
    _require_embedded(settings)
    return backup.back_up(settings.data_dir, target)


def restore(settings: Settings, source: Path) -> Manifest:
    """Fills the data directory of these settings, which must be empty. Raises BackupFailed."""
    _require_embedded(settings)
    return backup.restore(source, settings.data_dir)


def _require_embedded(settings: Settings) -> None:
    if settings.engine != EMBEDDED:
        raise BadSettings(
            "a backup is of a data directory: on AWS use point-in-time recovery of the table "
            "(docs/deploy.md, Backup and restore)"
        )
