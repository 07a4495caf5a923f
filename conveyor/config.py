"""Settings: the environment, read once into a frozen value (SPEC 1.3)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from conveyor.domain import limits
from conveyor.domain.budget import MICROS, micros_from
from conveyor.domain.errors import ConveyorError

V = TypeVar("V")

_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})


class BadSettings(ConveyorError):
    """A setting that cannot be; the message names it and says what it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine: str = "embedded"
    data_dir: Path = Path(".conveyor")
    host: str = "127.0.0.1"
    port: int = 8080
    gateway_url: str = "direct"
    credit_micros: int | None = None
    allow_private_targets: bool = False
    auth: str = "passthrough"
    api_keys: frozenset[str] = frozenset()
    secret_key: str | None = field(default=None, repr=False)
    sync_tasks_max: int = limits.SYNC_TASKS_MAX
    task_shard_count: int = limits.TASK_SHARD_COUNT
    max_inflight: int = limits.MAX_INFLIGHT
    concurrency: int = limits.CONCURRENCY
    metrics_port: int | None = None
    drain_s: int = limits.DRAIN_S
    body_days: int = limits.BODY_DAYS
    log: str | None = None
    crash_at: str | None = None
    role: str | None = None
    table: str = ""
    bucket: str = ""
    queue_prefix: str = "conveyor-"
    redis_url: str | None = field(default=None, repr=False)
    aws_plane: str = "lean"


def load_settings() -> Settings:
    """The settings of this process."""
    return settings_from(os.environ)


def settings_from(environ: Mapping[str, str]) -> Settings:
    """The settings that these variables ask for; BadSettings for the first that cannot be."""
    read = _Reader(environ)
    auth = read("CONVEYOR_AUTH", "passthrough", _one_of("passthrough", "keys"))
    engine = read("CONVEYOR_ENGINE", "embedded", _one_of("embedded", "aws"))
    needed = _given if engine == "aws" else str
    return Settings(
        engine=engine,
        data_dir=read("CONVEYOR_DATA_DIR", ".conveyor", Path),
        host=read("CONVEYOR_HOST", "127.0.0.1", str),
        port=read("CONVEYOR_PORT", "8080", _between(0, 65535)),
        gateway_url=read("CONVEYOR_GATEWAY_URL", "direct", str),
        credit_micros=read("CONVEYOR_CREDIT_COST", "0", _money) or None,
        allow_private_targets=read("CONVEYOR_ALLOW_PRIVATE_TARGETS", "", _switch),
        auth=auth,
        api_keys=_api_keys(environ) if auth == "keys" else frozenset(),
        # Processes that share an engine share their secrets.
        secret_key=read("CONVEYOR_SECRET_KEY", "", needed) or None,
        sync_tasks_max=read(
            "CONVEYOR_SYNC_TASKS_MAX", str(limits.SYNC_TASKS_MAX), _between(1, limits.TASKS_MAX)
        ),
        task_shard_count=read(
            "CONVEYOR_TASK_SHARD_COUNT",
            str(limits.TASK_SHARD_COUNT),
            _between(1, limits.TASK_SHARD_COUNT_MAX),
        ),
        max_inflight=read(
            "CONVEYOR_MAX_INFLIGHT", str(limits.MAX_INFLIGHT), _between(1, limits.MAX_INFLIGHT_MAX)
        ),
        concurrency=read(
            "CONVEYOR_CONCURRENCY", str(limits.CONCURRENCY), _between(1, limits.MAX_INFLIGHT_MAX)
        ),
        metrics_port=read("CONVEYOR_METRICS_PORT", "", _port_if_given),
        drain_s=read("CONVEYOR_DRAIN_S", str(limits.DRAIN_S), _between(0, limits.DRAIN_S)),
        body_days=read(
            "CONVEYOR_BODY_DAYS", str(limits.BODY_DAYS), _between(1, limits.RESULT_TTL_DAYS_MAX)
        ),
        log=environ.get("CONVEYOR_LOG") or None,
        crash_at=environ.get("CONVEYOR_CRASH_AT") or None,
        role=read("CONVEYOR_ROLE", "", _one_of("", "dev", "api", "worker")) or None,
        table=read("CONVEYOR_TABLE", "", needed),
        bucket=read("CONVEYOR_BUCKET", "", needed),
        queue_prefix=read("CONVEYOR_QUEUE_PREFIX", "conveyor-", _queue_prefix),
        redis_url=read("CONVEYOR_REDIS_URL", "", _redis_url) or None,
        aws_plane=read("CONVEYOR_AWS_PLANE", "lean", _one_of("lean", "boto")),
    )


def environ_of(settings: Settings) -> dict[str, str]:
    """The environment in which a process of ours finds these settings, ours being the rest."""
    ours = {
        "CONVEYOR_ENGINE": settings.engine,
        "CONVEYOR_DATA_DIR": str(settings.data_dir.resolve()),
        "CONVEYOR_GATEWAY_URL": settings.gateway_url,
        "CONVEYOR_CREDIT_COST": f"{(settings.credit_micros or 0) / MICROS:.6f}",
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on" if settings.allow_private_targets else "off",
        "CONVEYOR_SECRET_KEY": settings.secret_key or "",
        "CONVEYOR_CONCURRENCY": str(settings.concurrency),
        "CONVEYOR_METRICS_PORT": "",
        "CONVEYOR_CRASH_AT": "",
        "CONVEYOR_ROLE": "",
    }
    return {**os.environ, **ours}


@dataclass(frozen=True, slots=True)
class _Reader:
    environ: Mapping[str, str]

    def __call__(self, name: str, default: str, parse: Callable[[str], V]) -> V:
        try:
            return parse(self.environ.get(name) or default)
        except ValueError as error:
            raise BadSettings(f"{name} {error}") from None


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return parse


def _between(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {text!r}")
        return int(text)

    return parse


def _port_if_given(text: str) -> int | None:
    return _between(0, 65535)(text) if text else None


def _money(text: str) -> int:
    micros = micros_from(text)
    if micros is None:
        raise ValueError(f"must be an amount of money such as 0.000276, not {text!r}")
    return micros


def _given(text: str) -> str:
    if not text:
        raise ValueError("must be given when CONVEYOR_ENGINE=aws")
    return text


def _queue_prefix(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,50}", text):
        raise ValueError("must be up to 50 letters, digits, hyphens and underscores")
    return text


def _redis_url(text: str) -> str:
    if text and not text.startswith(("redis://", "rediss://")):
        raise ValueError("must begin with redis:// or rediss://")
    return text


def _switch(text: str) -> bool:
    if text.lower() not in _ON | _OFF:
        raise ValueError(f"must be on or off, not {text!r}")
    return text.lower() in _ON


def _api_keys(environ: Mapping[str, str]) -> frozenset[str]:
    name = "CONVEYOR_API_KEYS_FILE"
    path = environ.get(name)
    if not path:
        raise BadSettings(f"{name} must name a file with one key a line when CONVEYOR_AUTH=keys")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadSettings(f"{name}: cannot read {path}: {error.strerror}") from None
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise BadSettings(f"{name}: {path} holds no key")
    return keys
