"""Compares the settings of every deployment with the defaults of the program.

A deployment file may repeat a default, but then it must repeat it correctly. Every setting that
differs from its default is listed here with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.config import BadSettings, settings_from
from conveyor.domain import limits
from conveyor.usecases.run import demand
from tests.deploy.templates import ROOT, load
from tests.tidy import tables

DEPLOY = ROOT / "deploy"
SECRETS = {
    "CONVEYOR_SECRET_KEY": "0123456789abcdef" * 4,
    "CONVEYOR_API_KEYS": "0123456789abcdef",
    "CONVEYOR_ADMIN_KEY": "0123456789abcdef",
}
# Example values of the data stack's exports, and of settings known only at deployment.
EXAMPLES = {
    "CONVEYOR_TABLE": "conveyor",
    "CONVEYOR_BUCKET": "conveyor-bodies",
    "CONVEYOR_SCALING": "conveyor",
    "CONVEYOR_PUBLIC_URL": "https://scrape.example",
}
# The conditions of service.yaml that hold with the default parameters.
HOLD_BY_DEFAULT = {"UsesKeys", "MakesVpc", "HasNoTls", "Scales"}

_ROLE = {"CONVEYOR_ROLE": "a container gets its role from its environment"}
_LISTENS = {"CONVEYOR_HOST": "clients connect from outside the container"}
_IMAGE = {
    **_LISTENS,
    "CONVEYOR_DATA_DIR": "the volume of the image",
    "CONVEYOR_BUILD": "set to the commit when the image is built",
}
_METRICS = {"CONVEYOR_METRICS_PORT": "health checks and metrics need a port"}
_KEYS = {
    "CONVEYOR_AUTH": "a public server refuses unknown keys",
    "CONVEYOR_API_KEYS": "the keys that it accepts",
}
_PROXY = {
    "CONVEYOR_PUBLIC_URL": "callers connect to the API through a proxy",
    "CONVEYOR_TRUSTED_PROXIES": "the proxy sends the addresses of callers",
}
_AWS = {
    "CONVEYOR_ENGINE": "the deployment is on AWS",
    "CONVEYOR_TABLE": "has no default",
    "CONVEYOR_BUCKET": "has no default",
    "CONVEYOR_SECRET_KEY": "all processes share one key",
}
_SCALING = {"CONVEYOR_SCALING": "the platform scales workers by their demand"}
_POSTGRES = {
    "CONVEYOR_ENGINE": "the deployment is on Postgres",
    "CONVEYOR_DATABASE_URL": "has no default",
    "CONVEYOR_BLOB_DIR": "all processes mount one folder",
    "CONVEYOR_SECRET_KEY": "all processes share one key",
}
# By deployment: the settings that differ from the defaults, with the reasons.
EXPECTED_DIFFERENCES = {
    "image": _IMAGE,
    "image of the gateway": {**_IMAGE, "CONVEYOR_ROLE": "the only role that needs this image"},
    "aws api": {
        **_ROLE,
        **_LISTENS,
        **_AWS,
        **_KEYS,
        **_PROXY,
        "CONVEYOR_ADMIN_KEY": "operators sign in to the dashboard",
    },
    "aws worker": {**_ROLE, **_LISTENS, **_AWS, **_METRICS, **_SCALING},
    "kubernetes api": {**_ROLE, **_AWS, **_KEYS, **_PROXY, **_METRICS, **_SCALING},
    "kubernetes worker": {**_ROLE, **_AWS, **_KEYS, **_PROXY, **_METRICS, **_SCALING},
    "kubernetes gateway": {
        "CONVEYOR_CHROMIUM_SANDBOX": "the default profile of the cluster refuses its namespaces"
    },
    "compose conveyor": {**_ROLE, **_KEYS, **_PROXY},
    "postgres migrate": {**_ROLE, **_POSTGRES},
    "postgres api": {**_ROLE, **_POSTGRES, **_KEYS, **_PROXY},
    "postgres worker": {**_ROLE, **_POSTGRES, **_METRICS},
    "unit": {
        "CONVEYOR_DATA_DIR": "the state directory of the unit",
        "CONVEYOR_LOG": "the journal keeps lines of JSON",
        "CONVEYOR_AUTH": "a public server refuses unknown keys",
        "CONVEYOR_API_KEYS_FILE": "systemd passes the keys as a credential",
    },
}
# The settings of an API and of workers that the template for AWS leaves out.
LEFT_OUT = {
    "CONVEYOR_DATA_DIR": "used only by the embedded engine",
    "CONVEYOR_ALLOW_PRIVATE_TARGETS": "would let callers fetch from the VPC",
    "CONVEYOR_API_KEYS_FILE": "the keys come from a secret",
    "CONVEYOR_VIEWER_KEY": "the operators' key is enough to begin with",
    "CONVEYOR_SYNC_TASKS_MAX": "its default suits the size of the tasks",
    "CONVEYOR_TASK_SHARD_COUNT": "its default suits 10 workers",
    "CONVEYOR_MAX_INFLIGHT": "a job may set its own",
    "CONVEYOR_BODY_MEMORY_MB": "follows from the memory of the container",
    "CONVEYOR_ROW_DAYS": "its default suits BodyDays",
    "CONVEYOR_LOG": "a container logs JSON by default",
    "CONVEYOR_LOG_LEVEL": "alarms read the log as it is",
    "CONVEYOR_BUILD": "the image sets it",
    "CONVEYOR_AWS_PLANE": "only for comparison",
    "CONVEYOR_AWS_TIMEOUT_S": "its default suits one region",
    "CONVEYOR_BLOB_DIR": "bodies are in the bucket",
    "CONVEYOR_DATABASE_PASSWORD_FILE": "the password is in the URL, which is a secret",
    "CONVEYOR_DATABASE_POOLING": "its default suits a server and RDS Proxy's sessions",
    "CONVEYOR_DATABASE_CONNECTIONS": "its default suits 10 workers",
}


def _environs(credentials: Path) -> dict[str, dict[str, str]]:
    """Returns the environment of each process that the files of deploy/ define, with examples for
    values that an operator fills in."""
    (unit,) = re.findall(r"^Environment=(.*)", _read("box/conveyor.service"), re.MULTILINE)
    program, gateway = (
        dict(re.findall(r"\b(CONVEYOR_\w+)=(\S+)", _stage(name))) for name in ("program", "gateway")
    )
    return {
        "image": program,
        "image of the gateway": program | gateway,
        "aws api": _task("ApiTask"),
        "aws worker": _task("WorkerTask"),
        **_pods(),
        "compose conveyor": _service("compose.yaml", "conveyor"),
        **{
            f"postgres {name}": _service("compose.postgres.yaml", name)
            for name in ("migrate", "api", "worker")
        },
        "unit": dict(pair.split("=", 1) for pair in unit.replace("%d", str(credentials)).split()),
    }


def _read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def _stage(name: str) -> str:
    """Returns the instructions of a stage of the Dockerfile."""
    return _read("Dockerfile").partition(f" AS {name}\n")[2].partition("\nFROM ")[0]


def _task(name: str) -> dict[str, str]:
    (container,) = load("service.yaml")["Resources"][name]["Properties"]["ContainerDefinitions"]
    environ = {
        item["Name"]: _deployed(item["Name"], item["Value"])
        for item in _default_items(container["Environment"])
    }
    return environ | _select(
        SECRETS, (item["Name"] for item in _default_items(container["Secrets"]))
    )


def _default_items(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items that a stack with the default parameters contains."""
    chosen = [_if_default(item) for item in listed]
    return [item for item in chosen if item != {"Ref": "AWS::NoValue"}]


def _if_default(value: Any) -> Any:
    match value:
        case {"Fn::If": [condition, then, otherwise]}:
            return _if_default(then if condition in HOLD_BY_DEFAULT else otherwise)
    return value


def _deployed(name: str, value: Any) -> str:
    parameters = load("service.yaml")["Parameters"] | load("data.yaml")["Parameters"]
    match _if_default(value):
        case str() as text:
            return text
        case {"Ref": parameter} if parameter in parameters:
            return str(parameters[parameter]["Default"])
        case {"Fn::ImportValue": {"Fn::Sub": text}} if text.split("-")[-1] in parameters:
            return str(parameters[text.split("-")[-1]]["Default"])
    return EXAMPLES.get(name, "example")


def _select(values: Mapping[str, str], names: Any) -> dict[str, str]:
    return {name: values[name] for name in names if name in values}


def _manifests(kind: str) -> dict[str, dict[str, Any]]:
    files = map(_read, ("kubernetes/conveyor.yaml", "kubernetes/gateway.yaml"))
    manifests = chain.from_iterable(map(yaml.safe_load_all, files))
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def _pods() -> dict[str, dict[str, str]]:
    shared = _manifests("ConfigMap")["conveyor"]["data"]
    secrets = _select(SECRETS, re.findall(r"from-literal=(\w+)", _read("kubernetes/conveyor.yaml")))
    environs = {}
    for name, deployment in _manifests("Deployment").items():
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        own = {item["name"]: item["value"] for item in container["env"]}
        environs[f"kubernetes {name}"] = (
            {**shared, **secrets, **own} if "envFrom" in container else own
        )
    return environs


def _service(file: str, name: str) -> dict[str, str]:
    environment = yaml.safe_load(_read(f"box/{file}"))["services"][name]["environment"]
    return {name: _interpolate(name, value) for name, value in environment.items()}


def _interpolate(name: str, value: str) -> str:
    """Returns the default of `${NAME:-default}`; an example value if there is no default."""
    if value.startswith("${") and ":?" in value:
        return SECRETS.get(name, "example")
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def _differences(environ: Mapping[str, str]) -> set[str]:
    """Returns the variables without which the program's settings differ or are refused."""
    settings = settings_from(environ)
    return {name for name in environ if _without(environ, name) != settings}


def _without(environ: Mapping[str, str], name: str) -> object:
    try:
        return settings_from({key: value for key, value in environ.items() if key != name})
    except BadSettings:
        return None


@pytest.mark.parametrize("deployment", EXPECTED_DIFFERENCES)
def test_a_deployment_differs_from_the_defaults_only_where_listed(
    deployment: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("0123456789abcdef")
    environ = _environs(tmp_path)[deployment]

    ours = {name: value for name, value in environ.items() if name.startswith("CONVEYOR_")}

    assert _differences(ours) == EXPECTED_DIFFERENCES[deployment].keys()


def test_every_deployment_is_compared(tmp_path: Path) -> None:
    assert _environs(tmp_path).keys() == EXPECTED_DIFFERENCES.keys()


@pytest.mark.slow
def test_the_template_offers_every_setting_that_is_not_listed_as_left_out() -> None:
    settings = set(re.findall(r"^\| `(CONVEYOR_\w+)` \|", tables.settings(), re.MULTILINE))
    of_other_roles = {name for name in settings if "_GATEWAY_" in name or "_QUOTA_" in name}
    of_other_roles |= {name for name in settings if name.startswith("CONVEYOR_CHROMIUM")}
    containers = chain.from_iterable(
        load("service.yaml")["Resources"][task]["Properties"]["ContainerDefinitions"]
        for task in ("ApiTask", "WorkerTask")
    )
    offered = set(re.findall(r"CONVEYOR_[A-Z_]+", str(list(containers))))

    assert offered & LEFT_OUT.keys() == set()
    assert settings - of_other_roles - offered == LEFT_OUT.keys()


def test_the_sizes_of_the_fleet_are_the_same_on_every_platform() -> None:
    sizes = {
        name: item["Default"]
        for name, item in load("service.yaml")["Parameters"].items()
        if "Default" in item
    }
    scalers = _manifests("HorizontalPodAutoscaler")

    for role in ("Api", "Worker"):
        scaler = scalers[role.lower()]["spec"]
        assert scaler["minReplicas"] == sizes[f"{role}Min"]
        assert scaler["maxReplicas"] == sizes[f"{role}Max"]
        (container,) = _manifests("Deployment")[role.lower()]["spec"]["template"]["spec"][
            "containers"
        ]
        assert _mib(container["resources"]["limits"]["memory"]) == sizes[f"{role}Memory"]
    target = scalers["worker"]["spec"]["metrics"][0]["pods"]["target"]["averageValue"]
    assert float(target) == 100 * demand.TARGET
    (unit,) = re.findall(r"^MemoryMax=(.*)", _read("box/conveyor.service"), re.MULTILINE)
    assert _mib(unit) == sizes["WorkerMemory"]
    for file in ("compose.yaml", "compose.postgres.yaml"):
        assert _mib(_interpolate("", _memory_of(file))) == sizes["WorkerMemory"]


def _memory_of(file: str) -> str:
    limit: str
    (limit,) = set(re.findall(r"mem_limit: (\$\{MEMORY.*\})", _read(f"box/{file}")))
    return limit


def _mib(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([GgMm])i?", text).groups()  # type: ignore[union-attr]
    return int(number) * {"g": 1024, "m": 1}[unit.lower()]


def test_the_proxy_accepts_the_largest_request() -> None:
    (most,) = re.findall(r"max_size (\w+)", _read("box/Caddyfile"))

    assert most == f"{limits.REQUEST_BYTES_MAX // 1024**2}MiB"
