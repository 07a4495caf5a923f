"""Settings: the environment, read once into a frozen value (docs/operations.md, Settings)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from conveyor.api.server.auth import Network, parse_networks
from conveyor.domain import limits
from conveyor.domain.budget import MICROS, micros_from
from conveyor.domain.errors import ConveyorError
from conveyor.domain.quota import DEFAULTS, Quota, Quotas

V = TypeVar("V")

_QUOTA_DIGITS_MAX = 18
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})

_PREFIX = "CONVEYOR_"
_OF_CLIENTS = (f"{_PREFIX}URL", f"{_PREFIX}API_KEY", f"{_PREFIX}WEBHOOK_SECRET")
_OF_TESTS = (f"{_PREFIX}TEST_", f"{_PREFIX}ATTACK_")
# What Kubernetes sets for a service whose name begins with `conveyor`.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d")
KEYS_FILE = "CONVEYOR_API_KEYS_FILE"
KEYS = "CONVEYOR_API_KEYS"
# Bounds guessing: 16 random letters and digits are 95 bits. Repeated characters are refused too.
KEY_CHARS_MIN = 16
KEY_DISTINCT_MIN = 8


QUOTAS = {
    "CONVEYOR_QUOTA_LIVE_RUNS": Quota.LIVE_RUNS,
    "CONVEYOR_QUOTA_OPEN_JOBS": Quota.OPEN_JOBS,
    "CONVEYOR_QUOTA_STORED_TASKS": Quota.STORED_TASKS,
    "CONVEYOR_QUOTA_STORED_BYTES": Quota.STORED_BYTES,
    "CONVEYOR_QUOTA_EXPORTS_PER_RUN": Quota.EXPORTS_PER_RUN,
    "CONVEYOR_QUOTA_UPLOAD_SLOTS": Quota.UPLOAD_SLOTS,
    "CONVEYOR_QUOTA_REQUESTS_PER_S": Quota.REQUESTS_PER_S,
    "CONVEYOR_QUOTA_STREAMS": Quota.STREAMS,
    "CONVEYOR_QUOTA_AUDITS": Quota.AUDITS,
    "CONVEYOR_QUOTA_WEBHOOK_TESTS_PER_MIN": Quota.WEBHOOK_TESTS_PER_MIN,
    "CONVEYOR_QUOTA_ADDRESS_CALLERS": Quota.ADDRESS_CALLERS,
    "CONVEYOR_QUOTA_ADDRESS_REQUESTS_PER_S": Quota.ADDRESS_REQUESTS_PER_S,
    "CONVEYOR_QUOTA_ADDRESS_STREAMS": Quota.ADDRESS_STREAMS,
}


class BadSettings(ConveyorError):
    """A setting is invalid. The message names the setting and its valid values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    #: The database of the Postgres engine, or of the tasks of the AWS engine:
    #: `postgresql://user@host/name?sslmode=verify-full`.
    database_url: str = field(default="", repr=False)
    #: A file with the password of that database. The program reads it for each connection, so it
    #: may hold a token that expires.
    database_password_file: Path | None = None
    #: `session`: each connection keeps its session. `transaction`: a pooler such as PgBouncer gives
    #: each transaction another connection; nothing is prepared then, and signals are polled.
    database_pooling: str = "session"
    #: Connections that one process opens to the database, one more for signals apart.
    database_connections: int = limits.DATABASE_CONNECTIONS
    #: A folder for bodies that all processes of the Postgres engine share, instead of a bucket.
    blob_dir: Path | None = None
    #: Where the AWS engine has tasks, their counters and events: `dynamodb`, or `postgres`, which
    #: has no shards and no write cap. Fixed when the deployment is created.
    task_store: str = "dynamodb"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of `conveyor gateway`."""

    #: Pages that it renders at the same time; by default two for each CPU.
    gateway_pages: int | None = None
    #: Calls of one key that it performs at the same time, with a browser or without.
    gateway_calls: int = limits.GATEWAY_CALLS
    #: Megabytes of a browser, with all its pages, above which it is replaced. A browser with twice
    #: as much is killed.
    gateway_browser_mb: int = limits.GATEWAY_BROWSER_MB
    #: A file with a proxy on each line: its URL, and labels such as `country=us class=premium`.
    gateway_proxies: Path | None = None
    #: The program that renders pages; by default the Chromium of the system or of Playwright.
    chromium: str | None = None
    #: Chromium's own sandbox. `off` is for containers that may not create user namespaces; root
    #: never has it.
    chromium_sandbox: bool = True
    #: The URL of a gateway for pages that need a browser, while all others are fetched directly.
    #: `dev` and `scrape` start one by themselves if Chromium is installed.
    renderer_url: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine: str = "embedded"  #: The storage engine.
    data_dir: Path = Path(".conveyor")  #: The data directory of the embedded engine.
    host: str = "127.0.0.1"  #: The address that the API listens on.
    port: int = 8080  #: The port that the API listens on; 0 picks a free one.
    #: How callers reach the API, such as `https://scrape.example`; every link starts with it.
    #: Needed behind a proxy, and where callers use a host name.
    public_url: str | None = None
    #: Addresses and networks of proxies, separated by commas, whose forwarded headers are used.
    trusted_proxies: tuple[Network, ...] = ()
    #: `direct` fetches pages itself; otherwise the URL of a ZenRows-compatible endpoint.
    gateway_url: str = "direct"
    #: The most that one credit of that endpoint costs, such as 0.000276; budgets in money need it.
    credit_micros: int | None = None
    #: Lets tasks and webhooks reach private and loopback addresses, any port, and plain-http
    #: webhooks.
    allow_private_targets: bool = False
    #: `passthrough`: any key names its caller and is forwarded to the gateway. `keys`: only listed
    #: keys are accepted.
    auth: str = "passthrough"
    #: A file with one API key per line, for `keys`; `#` starts a comment. The program reads the
    #: file again when it changes.
    api_keys_file: Path | None = None
    #: API keys separated by spaces, for `keys` on platforms that inject secrets as
    #: variables. Each has at least 16 characters, 8 of them different.
    api_keys: frozenset[str] = field(default=frozenset(), repr=False)
    #: The key with which operators sign in to the dashboard. They see the jobs of all callers, and
    #: may stop and change them.
    admin_key: str | None = field(default=None, repr=False)
    #: As the operators' key, for a session that changes nothing.
    viewer_key: str | None = field(default=None, repr=False)
    #: Seals secrets at rest, signs cursors and links, and names callers. The embedded engine
    #: creates one in the data directory; the other engines need one. `secret.key:` and the content
    #: of that file name the same secret.
    secret_key: str | None = field(default=None, repr=False)
    #: Lists with fewer lines are ingested before the response; longer ones are answered with 202.
    sync_tasks_max: int = limits.SYNC_TASKS_MAX
    #: Shards of a large or open job, fixed when the job is created. Tasks on Postgres have one.
    task_shard_count: int = limits.TASK_SHARD_COUNT
    max_inflight: int = limits.MAX_INFLIGHT  #: Cap on parallel tasks of a job that states none.
    #: Tasks of one caller that one process runs at the same time, over all jobs; half as many again
    #: are reserved for other callers.
    concurrency: int = limits.CONCURRENCY
    #: MiB of page bodies that one process holds in memory, from their arrival until they are
    #: stored; a page that needs more waits. By default half of the memory limit of the container,
    #: or without one half of the machine's memory, up to 1024.
    body_memory_mb: int | None = None
    #: Port of `CONVEYOR_HOST` on which a `worker` of a shared engine serves `/metrics` and
    #: `/healthz`; 0 picks a free one; without it the worker listens on no port.
    metrics_port: int | None = None
    #: The name of the deployment, where its workers are scaled by demand. With it, a `worker`
    #: measures the demand, shows it in `/metrics`, and logs it once a minute in the embedded metric
    #: format of CloudWatch.
    scaling: str | None = None
    #: Seconds that a `worker` lets its fetches continue after SIGTERM, and a `gateway` its calls;
    #: at least 20 s less than the time until it is killed.
    drain_s: int = limits.DRAIN_S
    #: Days after its fetch that a body is kept at most; no job may ask for more.
    body_days: int = limits.BODY_DAYS
    #: Days that the rows of a run are kept after its results expired.
    row_days: int = limits.ROW_DAYS
    #: The log style, `text` or `json`; by default `json`, but `text` for `dev` on a terminal.
    log: str | None = None
    #: The least severe log lines of `dev`, `api` and `worker` that are written.
    log_level: str = "info"
    role: str | None = None  #: The role of the program when no command is given.
    build: str = "unknown"  #: The build of the program, such as a commit; the image sets it.
    table: str = ""  #: The DynamoDB table of the AWS engine.
    bucket: str = ""  #: The S3 bucket of the AWS engine, or for bodies of the Postgres engine.
    queue_prefix: str = "conveyor-"  #: Prefix of the names of the SQS queues.
    #: The Redis of the AWS engine, `redis://` or `rediss://`; without one, leases are rows of the
    #: table.
    redis_url: str | None = field(default=None, repr=False)
    postgres: PostgresSettings = field(default_factory=PostgresSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    #: The client for AWS calls: `lean` is our own; `boto` is aioboto3, for comparison, and as a
    #: fallback when a service sends a response that ours does not understand.
    aws_plane: str = "lean"
    quotas: Quotas = field(default_factory=lambda: DEFAULTS)
    #: Seconds that one AWS call has, all attempts included; calls to S3 have at least 60.
    aws_timeout_s: int = limits.AWS_TIMEOUT_S
    #: Milliseconds that a fetched page of up to 1 MiB waits for others of its run to share an
    #: object on S3; 0 stores each page as an object. No fetch waits for it, and a page waits for a
    #: quarter of it if no other page of its run comes. A million pages cost 5 USD of PUTs without
    #: packs, and about 0.05 in full packs.
    pack_wait_ms: int = limits.PACK_WAIT_MS

    @property
    def has_task_store(self) -> bool:
        return self.postgres.task_store == "postgres"

    @property
    def shard_count(self) -> int:
        """The shards of a large job. One server has no use for several."""
        return 1 if self.has_task_store else self.task_shard_count

    @property
    def at_once_max(self) -> int:
        """How many tasks the engine takes in one transaction with their job."""
        if self.has_task_store:
            return 0
        if self.engine == "aws":
            # A DynamoDB transaction has at most a hundred items, and the counters of each shard are
            # one of them.
            return limits.INLINE_TASKS_MAX - self.task_shard_count
        return limits.EMBEDDED_AT_ONCE_TASKS_MAX


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """The program exports `signals` (traces, metrics) over OTLP, and metrics every `interval_s`."""

    signals: frozenset[str]
    interval_s: float


def load_otlp_settings() -> OtlpSettings:
    """Returns what the OTEL_* variables of this process ask for. The packages of OpenTelemetry read
    all other variables themselves."""
    return otlp_settings_from(os.environ)


def otlp_settings_from(environ: Mapping[str, str]) -> OtlpSettings:
    """Nothing is exported without an endpoint."""
    everything = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    signals = frozenset(
        signal
        for signal in ("traces", "metrics")
        if (environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "") or everything)
        and environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp") != "none"
        and not is_off
    )
    read = _Reader(environ)
    interval_ms = read("OTEL_METRIC_EXPORT_INTERVAL", "60000", _between(100, 3_600_000))
    return OtlpSettings(signals, interval_ms / 1000)


def load_settings() -> Settings:
    """Returns the settings of this process."""
    return settings_from(os.environ)


def unknown_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Returns the variables that are named like settings and are none, each with the setting of
    the nearest name, if one is near."""
    names = {name for name in environ if name.startswith(_PREFIX)}
    if not names:
        return {}
    known = {KEYS, KEYS_FILE, *_OF_CLIENTS}
    settings_from({}, known)
    others = {name for name in names if name.startswith(_OF_TESTS) or _SERVICE_LINK.search(name)}
    unknown = names - known - others
    return {name: _nearest(name, known) for name in sorted(unknown)}


def _nearest(name: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches  # Rarely needed, and slow to import.

    # Without the prefix, which would make all of them alike.
    ends = sorted(setting.removeprefix(_PREFIX) for setting in known)
    near = get_close_matches(name.removeprefix(_PREFIX), ends, 1, cutoff=0.7)
    return _PREFIX + near[0] if near else None


def settings_from(environ: Mapping[str, str], names: set[str] | None = None) -> Settings:
    """Returns the settings; `names` gets those that it reads. Raises BadSettings."""
    read = _Reader(environ, set() if names is None else names)
    auth = read("CONVEYOR_AUTH", "passthrough", _one_of("passthrough", "keys"))
    engine = read("CONVEYOR_ENGINE", "embedded", _one_of("embedded", "postgres", "aws"))
    aws, shared = _needed_on(engine, "aws"), _needed_on(engine, "postgres", "aws")
    return Settings(
        engine=engine,
        data_dir=read("CONVEYOR_DATA_DIR", ".conveyor", Path),
        host=read("CONVEYOR_HOST", "127.0.0.1", str),
        port=read("CONVEYOR_PORT", "8080", _between(0, 65535)),
        public_url=read("CONVEYOR_PUBLIC_URL", "", _public_url) or None,
        trusted_proxies=read("CONVEYOR_TRUSTED_PROXIES", "", _networks),
        gateway_url=read("CONVEYOR_GATEWAY_URL", "direct", str),
        credit_micros=read("CONVEYOR_CREDIT_COST", "0", _money) or None,
        allow_private_targets=read("CONVEYOR_ALLOW_PRIVATE_TARGETS", "", _switch),
        auth=auth,
        api_keys_file=_api_keys_file(environ) if auth == "keys" else None,
        api_keys=read("CONVEYOR_API_KEYS", "", _api_keys) if auth == "keys" else frozenset(),
        admin_key=read("CONVEYOR_ADMIN_KEY", "", _operator_key) or None,
        viewer_key=read("CONVEYOR_VIEWER_KEY", "", _operator_key) or None,
        # Processes that share an engine must share the key, or they cannot read each other's
        # secrets.
        secret_key=read("CONVEYOR_SECRET_KEY", "", shared) or None,
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
        body_memory_mb=read(
            "CONVEYOR_BODY_MEMORY_MB",
            "",
            _between_if_given(limits.BODY_MEMORY_MB_MIN, limits.BODY_MEMORY_MB_MAX),
        ),
        metrics_port=read("CONVEYOR_METRICS_PORT", "", _between_if_given(0, 65535)),
        scaling=read("CONVEYOR_SCALING", "", str) or None,
        drain_s=read("CONVEYOR_DRAIN_S", str(limits.DRAIN_S), _between(0, limits.DRAIN_S)),
        body_days=read(
            "CONVEYOR_BODY_DAYS", str(limits.BODY_DAYS), _between(1, limits.RESULT_TTL_DAYS_MAX)
        ),
        row_days=read("CONVEYOR_ROW_DAYS", str(limits.ROW_DAYS), _between(1, limits.ROW_DAYS_MAX)),
        log=read("CONVEYOR_LOG", "", _one_of("", "text", "json")) or None,
        log_level=read("CONVEYOR_LOG_LEVEL", "info", _one_of("debug", "info", "warning", "error")),
        role=read("CONVEYOR_ROLE", "", _one_of("", "dev", "api", "worker", "gateway", "init"))
        or None,
        build=read("CONVEYOR_BUILD", "unknown", str),
        table=read("CONVEYOR_TABLE", "", aws),
        bucket=read("CONVEYOR_BUCKET", "", aws),
        queue_prefix=read("CONVEYOR_QUEUE_PREFIX", "conveyor-", _queue_prefix),
        redis_url=read("CONVEYOR_REDIS_URL", "", _redis_url) or None,
        postgres=_postgres_settings(read, engine),
        gateway=_gateway_settings(read),
        aws_plane=read("CONVEYOR_AWS_PLANE", "lean", _one_of("lean", "boto")),
        quotas=_quotas(read),
        aws_timeout_s=read(
            "CONVEYOR_AWS_TIMEOUT_S",
            str(limits.AWS_TIMEOUT_S),
            _between(1, limits.AWS_TIMEOUT_S_MAX),
        ),
        pack_wait_ms=read("CONVEYOR_PACK_WAIT_MS", str(limits.PACK_WAIT_MS), _between(0, 5000)),
    )


def _quotas(read: _Reader) -> Quotas:
    return {quota: read(name, str(DEFAULTS[quota]), _quota) for name, quota in QUOTAS.items()}


def _postgres_settings(read: _Reader, engine: str) -> PostgresSettings:
    has_task_store = read("CONVEYOR_TASK_STORE", "", str) == "postgres"
    if has_task_store and engine != "aws":
        raise BadSettings("CONVEYOR_TASK_STORE=postgres needs CONVEYOR_ENGINE=aws")
    is_needed = _needed("CONVEYOR_TASK_STORE=postgres")
    folder = read("CONVEYOR_BLOB_DIR", "", str)
    if engine == "postgres" and bool(folder) == bool(read("CONVEYOR_BUCKET", "", str)):
        raise BadSettings(
            "CONVEYOR_BLOB_DIR or CONVEYOR_BUCKET must be given, and not both, when "
            "CONVEYOR_ENGINE=postgres"
        )
    return PostgresSettings(
        database_url=read(
            "CONVEYOR_DATABASE_URL",
            "",
            is_needed if has_task_store else _needed_on(engine, "postgres"),
        ),
        database_password_file=read("CONVEYOR_DATABASE_PASSWORD_FILE", "", _path_if_given),
        database_pooling=read(
            "CONVEYOR_DATABASE_POOLING", "session", _one_of("session", "transaction")
        ),
        database_connections=read(
            "CONVEYOR_DATABASE_CONNECTIONS",
            str(limits.DATABASE_CONNECTIONS),
            _between(2, limits.DATABASE_CONNECTIONS_MAX),
        ),
        blob_dir=read("CONVEYOR_BLOB_DIR", "", _path_if_given),
        task_store=read("CONVEYOR_TASK_STORE", "dynamodb", _one_of("dynamodb", "postgres")),
    )


def _gateway_settings(read: _Reader) -> GatewaySettings:
    return GatewaySettings(
        gateway_pages=read(
            "CONVEYOR_GATEWAY_PAGES", "", _between_if_given(1, limits.GATEWAY_PAGES_MAX)
        ),
        gateway_calls=read(
            "CONVEYOR_GATEWAY_CALLS",
            str(limits.GATEWAY_CALLS),
            _between(1, limits.GATEWAY_CALLS_MAX),
        ),
        gateway_browser_mb=read(
            "CONVEYOR_GATEWAY_BROWSER_MB",
            str(limits.GATEWAY_BROWSER_MB),
            _between(limits.GATEWAY_BROWSER_MB_MIN, limits.GATEWAY_BROWSER_MB_MAX),
        ),
        gateway_proxies=read("CONVEYOR_GATEWAY_PROXIES", "", _path_if_given),
        chromium=read("CONVEYOR_CHROMIUM", "", str) or None,
        chromium_sandbox=read("CONVEYOR_CHROMIUM_SANDBOX", "on", _switch),
        renderer_url=read("CONVEYOR_RENDERER_URL", "", str) or None,
    )


def wants_colour() -> bool:
    """Whether a terminal may be coloured (no-color.org)."""
    return not os.environ.get("NO_COLOR")


def program_environ() -> Mapping[str, str]:
    """Returns the environment, for finding and starting programs that are not Conveyor's."""
    return os.environ


def protect_imports() -> None:
    """Prevents child Python processes from importing modules from the working directory."""
    os.environ["PYTHONSAFEPATH"] = "1"


def environ_of(settings: Settings) -> dict[str, str]:
    """Returns the environment for a child process: this environment with these settings."""
    ours = {
        "CONVEYOR_ENGINE": settings.engine,
        "CONVEYOR_DATA_DIR": str(settings.data_dir.resolve()),
        "CONVEYOR_GATEWAY_URL": settings.gateway_url,
        "CONVEYOR_CREDIT_COST": f"{(settings.credit_micros or 0) / MICROS:.6f}",
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on" if settings.allow_private_targets else "off",
        "CONVEYOR_RENDERER_URL": settings.gateway.renderer_url or "",
        "CONVEYOR_SECRET_KEY": settings.secret_key or "",
        "CONVEYOR_CONCURRENCY": str(settings.concurrency),
        "CONVEYOR_BODY_MEMORY_MB": str(settings.body_memory_mb or ""),
        "CONVEYOR_METRICS_PORT": "",
        "CONVEYOR_ROLE": "",
        "PYTHONSAFEPATH": "1",
    }
    return {**os.environ, **ours}


@dataclass(frozen=True, slots=True)
class _Reader:
    environ: Mapping[str, str]
    names: set[str] = field(default_factory=set)

    def __call__(self, name: str, default: str, parse: Callable[[str], V]) -> V:
        self.names.add(name)
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


def _between_if_given(least: int, most: int) -> Callable[[str], int | None]:
    parse = _between(least, most)
    return lambda text: parse(text) if text else None


def _public_url(text: str) -> str:
    if not text:
        return ""
    if re.fullmatch(r"https?://[^/?#@\s\\]+(/[^?#\s\\]*)?", text) is None:
        raise ValueError(f"must be a URL such as https://scrape.example, not {text!r}")
    return text.rstrip("/")


def _networks(text: str) -> tuple[Network, ...]:
    try:
        return parse_networks(text)
    except ValueError as error:
        raise ValueError(f"must be addresses or networks, such as 10.0.0.0/8: {error}") from None


def _money(text: str) -> int:
    micros = micros_from(text)
    if micros is None:
        raise ValueError(f"must be an amount of money such as 0.000276, not {text!r}")
    return micros


def _needed_on(engine: str, *engines: str) -> Callable[[str], str]:
    """Returns the parser of a setting that these engines need."""
    return _needed(f"CONVEYOR_ENGINE={engine}") if engine in engines else str


def _needed(cause: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not text:
            raise ValueError(f"must be given when {cause}")
        return text

    return parse


def _path_if_given(text: str) -> Path | None:
    return Path(text) if text else None


def _operator_key(text: str) -> str:
    """A key that can be typed, and not be guessed."""
    if text and not (16 <= len(text) <= 256 and text.isascii() and text.isprintable()):
        raise ValueError("must be 16 to 256 printable ASCII characters")
    return text


def _queue_prefix(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,50}", text):
        raise ValueError("must be up to 50 letters, digits, hyphens and underscores")
    return text


def _redis_url(text: str) -> str:
    if text and not text.startswith(("redis://", "rediss://")):
        raise ValueError("must begin with redis:// or rediss://")
    return text


def _quota(text: str) -> int | None:
    if text.lower() in {"0", "off"}:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _QUOTA_DIGITS_MAX):
        raise ValueError(f"must be a whole number, or off to lift the quota, not {text!r}")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in _ON | _OFF:
        raise ValueError(f"must be on or off, not {text!r}")
    return text.lower() in _ON


class KeyFile:
    """The file of API keys, one per line. It may change while the program runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def stamp(self) -> object:
        """Returns a value that differs after the file was changed or replaced."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def load(self) -> frozenset[str]:
        """Reads the keys. Raises BadSettings if the file contains no key."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise BadSettings(f"{KEYS_FILE}: cannot read {self._path}: {cause}") from None
        lines = [line.strip() for line in lines]
        keys = frozenset(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise BadSettings(f"{KEYS_FILE}: {self._path} holds no key")
        return keys


def _api_keys_file(environ: Mapping[str, str]) -> Path | None:
    path = environ.get(KEYS_FILE)
    if not path and environ.get(KEYS):
        return None
    if not path:
        raise BadSettings(
            f"{KEYS_FILE} must name a file with one key a line, or {KEYS} hold the keys, "
            "when CONVEYOR_AUTH=keys"
        )
    if environ.get(KEYS):
        raise BadSettings(f"{KEYS} and {KEYS_FILE} cannot both be set: choose one")
    KeyFile(Path(path)).load()
    return Path(path)


def _api_keys(text: str) -> frozenset[str]:
    keys = frozenset(text.split())
    for number, key in enumerate(sorted(keys), start=1):
        # The message must not contain the key.
        if len(key) < KEY_CHARS_MIN or len(set(key)) < KEY_DISTINCT_MIN:
            raise ValueError(
                f"holds a weak key (number {number} of {len(keys)} in sorted order): a key needs "
                f"{KEY_CHARS_MIN} characters, {KEY_DISTINCT_MIN} of them different"
            )
    return keys


def is_strong_secret(secret: str) -> bool:
    """Whether a secret key cannot be guessed. A weak one is only warned about: the data that it
    sealed could not be read with another."""
    return len(secret) >= KEY_CHARS_MIN and len(set(secret)) >= KEY_DISTINCT_MIN
