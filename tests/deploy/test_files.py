"""Compares the files of deploy/ with the program: settings, metrics, probes, the image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from conveyor.config import settings_from
from conveyor.engines.aws.client.usage import Meter
from conveyor.gateway.server import make_call_metrics
from conveyor.telemetry import EngineUsage, make_metrics
from tests.deploy.templates import ROOT

DEPLOY = ROOT / "deploy"
SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def _metric_names() -> set[str]:
    registry = CollectorRegistry()
    make_metrics(registry)
    registry.register(EngineUsage(Meter(), {}))
    make_call_metrics(registry)
    return {
        f"{family.name}{suffix}"
        for family in registry.collect()
        for suffix in SAMPLES.get(family.type, ("",))
    }


def _names_in(path: Path) -> set[str]:
    return set(re.findall(r"\bconveyor_[a-z_]+", path.read_text()))


@pytest.mark.parametrize(
    "name", ["monitoring/alerts.yml", "monitoring/dashboard.json", "kubernetes/conveyor.yaml"]
)
def test_every_metric_in_the_files_exists(name: str) -> None:
    named = _names_in(DEPLOY / name)

    assert named
    assert named - _metric_names() == set()


def test_every_alert_has_a_rule_test() -> None:
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "monitoring/alerts.yml").read_text())
    tested = re.findall(r"alertname: (\w+)", (DEPLOY / "monitoring/alerts_test.yml").read_text())

    assert set(alerts) == set(tested)


def test_every_alert_is_documented() -> None:
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "monitoring/alerts.yml").read_text())
    document = (ROOT / "docs/deploy.md").read_text()

    assert re.findall(r"^\| `(Conveyor\w+)` \|", document, re.MULTILINE) == alerts


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: make test-deploy installs it")

    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")):
        subprocess.run([promtool, *command], cwd=DEPLOY / "monitoring", check=True)


def _manifests() -> Iterator[dict[str, object]]:
    yield from yaml.safe_load_all((DEPLOY / "kubernetes/conveyor.yaml").read_text())


@pytest.mark.parametrize("role", ["api", "worker"])
def test_the_program_accepts_the_config_map(role: str) -> None:
    (config,) = [item["data"] for item in _manifests() if item["kind"] == "ConfigMap"]
    secrets = {"CONVEYOR_SECRET_KEY": "s" * 64, "CONVEYOR_API_KEYS": "0123456789abcdef"}

    settings = settings_from({**config, **secrets, "CONVEYOR_ROLE": role})  # type: ignore[dict-item]

    assert (settings.role, settings.engine, settings.metrics_port) == (role, "aws", 9090)


def test_the_manifests_have_probes_and_enough_time_to_stop() -> None:
    text = (DEPLOY / "kubernetes/conveyor.yaml").read_text()

    assert text.count("path: /readyz") == text.count("readinessProbe") == 2
    assert text.count("terminationGracePeriodSeconds: 120") == 2
    assert text.count("readOnlyRootFilesystem: true") == 2


def test_the_compose_file_runs_the_service_without_privileges() -> None:
    services = yaml.safe_load((DEPLOY / "box/compose.yaml").read_text())["services"]
    service = services["conveyor"]

    for name in ("conveyor", "gateway"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["init"] is True
        assert "ports" not in services[name]  # Only Caddy publishes a port.
    assert settings_from({"CONVEYOR_ROLE": service["environment"]["CONVEYOR_ROLE"]}).role == "dev"


def test_the_image_installs_dependencies_before_the_program() -> None:
    text = (DEPLOY / "Dockerfile").read_text()

    assert text.index("pip install -r requirements.txt") < text.index("COPY conveyor conveyor")
    assert "USER 10001:10001" in text
    assert re.search(r"(SECRET|PASSWORD|TOKEN)", text) is None


def test_every_panel_of_the_dashboard_has_a_query() -> None:
    dashboard = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())

    assert [panel["targets"] for panel in dashboard["panels"] if not panel["targets"]] == []


def test_both_compose_files_have_the_same_gateway() -> None:
    files = ("compose.yaml", "compose.postgres.yaml")
    one, other = (
        yaml.safe_load((DEPLOY / "box" / name).read_text())["services"]["gateway"] for name in files
    )

    assert one == other


def test_the_compose_file_for_postgres_migrates_before_it_serves() -> None:
    services = yaml.safe_load((DEPLOY / "box/compose.postgres.yaml").read_text())["services"]

    for name in ("migrate", "api", "worker"):
        assert services[name]["read_only"]
        assert services[name]["cap_drop"] == ["ALL"]
        values = {key: str(value) for key, value in services[name]["environment"].items()}
        known = {key: value for key, value in values.items() if not value.startswith("${")}
        secret = {"CONVEYOR_SECRET_KEY": "of many characters", "CONVEYOR_AUTH": "passthrough"}
        settings = settings_from({**known, **secret})
        assert (settings.engine, settings.bucket) == ("postgres", "")
    for name in ("api", "worker"):
        depends_on = services[name]["depends_on"]
        assert depends_on == {"migrate": {"condition": "service_completed_successfully"}}


# The extras that the image leaves out, with the reasons.
NOT_INSTALLED = {
    "bench": "for developers",
    "browser": "the image of the gateway has the Chromium of Debian",
    "mcp": "runs beside the agent",
    "parquet": "130 MB for one format of exports; the build argument EXTRAS adds it",
    "simulate": "for developers",
    "test": "for developers",
}


def test_the_image_has_every_extra_that_a_server_uses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (installed,) = re.findall(r'^ARG EXTRAS="(.*)"$', _dockerfile(), re.MULTILINE)
    left = project["optional-dependencies"].keys() - set(installed.split())

    assert left == NOT_INSTALLED.keys()


def _dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_the_default_image_has_no_browser() -> None:
    stages = re.split(r"^FROM ", _dockerfile(), flags=re.MULTILINE)

    assert stages[-1] == "program AS service\n"
    assert [name for name in map(_stage_name, stages[1:]) if "chromium" in _stage(name)] == [
        "gateway"
    ]


def _stage_name(stage: str) -> str:
    return stage.splitlines()[0].split(" AS ")[-1]


def _stage(name: str) -> str:
    """Returns the instructions of a stage of the image."""
    _, _, rest = _dockerfile().partition(f" AS {name}\n")
    return rest.partition("\nFROM ")[0]
