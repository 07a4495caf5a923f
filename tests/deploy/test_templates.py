"""Compares the templates with the program: resources of `conveyor init`, settings, permissions and
costs (docs/deploy.md, On AWS). It also compares properties that local emulators ignore."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from actors.demand_reporter import metric_line
from conveyor.config import settings_from
from conveyor.engines.aws.dynamodb import table
from conveyor.engines.aws.dynamodb.keys import TTL
from conveyor.engines.aws.s3 import PRIVATE, lifecycle
from conveyor.engines.aws.sqs import CONTROL, DEAD, RECEIVES_MAX, RUN_ATTRIBUTES
from conveyor.usecases.run import demand
from conveyor.usecases.run.demand import Demand
from tests.deploy.containers.uses import USES
from tests.deploy.templates import AWS, actions_of, load
from tests.servers import SERVERS, find_program

DATA, SERVICE = load("data.yaml")["Resources"], load("service.yaml")["Resources"]
BODY_DAYS = 30


def test_the_table_of_the_template_is_the_one_that_init_creates() -> None:
    ours = dict(DATA["Table"]["Properties"])
    definition = table.definition("t")

    assert {name: ours[name] for name in definition if name != "TableName"} == {
        name: value for name, value in definition.items() if name != "TableName"
    }
    assert ours["TimeToLiveSpecification"] == {"AttributeName": TTL, "Enabled": True}


def test_the_bucket_has_the_rules_that_init_sets() -> None:
    ours = DATA["Bucket"]["Properties"]
    rules = ours["LifecycleConfiguration"]["Rules"]

    assert [_as_init(rule) for rule in rules] == lifecycle(BODY_DAYS)
    assert ours["PublicAccessBlockConfiguration"] == PRIVATE


def _as_init(rule: dict[str, Any]) -> dict[str, Any]:
    """Converts a lifecycle rule of CloudFormation to the form of the S3 API."""
    days = rule.get("ExpirationInDays")
    properties: dict[str, Any] = {
        name: rule[name]
        for name in ("AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration")
        if name in rule
    }
    if days is not None:
        properties["Expiration"] = {"Days": BODY_DAYS if days == {"Ref": "BodyDays"} else days}
    return {
        "ID": rule["Id"],
        "Status": rule["Status"],
        "Filter": {"Prefix": rule.get("Prefix", "")},
        **properties,
    }


@pytest.mark.parametrize(("queue", "name"), [("ControlQueue", CONTROL), ("DeadQueue", DEAD)])
def test_the_queues_are_those_that_init_creates(queue: str, name: str) -> None:
    ours = DATA[queue]["Properties"]

    assert ours["QueueName"] == {"Fn::Sub": f"${{QueuePrefix}}{name}"}
    assert {item: str(ours[item]) for item in RUN_ATTRIBUTES} == RUN_ATTRIBUTES
    if queue == "ControlQueue":
        assert ours["RedrivePolicy"] == {
            "deadLetterTargetArn": {"Fn::GetAtt": ["DeadQueue", "Arn"]},
            "maxReceiveCount": RECEIVES_MAX,
        }


def test_resources_with_data_are_retained_when_their_stack_is_deleted() -> None:
    for resource in DATA.values():
        assert (resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == ("Retain", "Retain")


@pytest.mark.parametrize("task", ["ApiTask", "WorkerTask"])
def test_the_program_accepts_the_environment_of_a_task(task: str) -> None:
    (container,) = SERVICE[task]["Properties"]["ContainerDefinitions"]
    environ = {
        item["Name"]: _example(item["Name"], item["Value"]) for item in container["Environment"]
    }
    secrets = {secret["Name"] for secret in _secrets(container)}

    settings = settings_from({**environ, **dict.fromkeys(secrets, SECRET)})

    assert settings.role == container["Name"]
    assert settings.engine == "aws"
    assert not {name for name in (*environ, *secrets) if _is_unknown(name)}
    # Drain and grace must end before ECS kills the task.
    assert settings.drain_s + 20 <= container["StopTimeout"]


SECRET = "rediss://:0123456789abcdef@redis.example:6379"
EXAMPLES = {
    "CONVEYOR_BODY_DAYS": "30",
    "CONVEYOR_CONCURRENCY": "200",
    "CONVEYOR_PACK_WAIT_MS": "3000",
    "CONVEYOR_AUTH": "keys",
    "CONVEYOR_GATEWAY_URL": "direct",
    "CONVEYOR_CREDIT_COST": "0.000276",
    "CONVEYOR_TRUSTED_PROXIES": "10.90.0.0/16",
    "CONVEYOR_PUBLIC_URL": "https://scrape.example",
}


def _example(name: str, value: object) -> str:
    match value:
        case {"Fn::If": ["HasTaskDatabase", str(text), _]}:
            return text
    return value if isinstance(value, str) else EXAMPLES.get(name, "example")


def _secrets(container: dict[str, Any]) -> list[dict[str, Any]]:
    listed = container["Secrets"]
    return [item["Fn::If"][1] if "Fn::If" in item else item for item in listed]


def _is_unknown(name: str) -> bool:
    text = (AWS.parents[1] / "conveyor" / "config.py").read_text()
    return name.startswith("CONVEYOR_") and f'"{name}"' not in text


def test_tasks_run_without_privileges() -> None:
    for task in ("ApiTask", "WorkerTask"):
        (container,) = SERVICE[task]["Properties"]["ContainerDefinitions"]
        assert container["ReadonlyRootFilesystem"] is True
        assert container["User"] == "10001:10001"
        assert container["LinuxParameters"] == {
            "InitProcessEnabled": True,
            "Capabilities": {"Drop": ["ALL"]},
        }


def test_an_update_keeps_the_scaled_count_and_rolls_back_a_failure() -> None:
    for service in ("ApiService", "WorkerService"):
        properties = SERVICE[service]["Properties"]
        assert "DesiredCount" not in properties
        breaker = properties["DeploymentConfiguration"]["DeploymentCircuitBreaker"]
        assert breaker == {"Enable": True, "Rollback": True}


def test_an_update_reaches_the_api_before_the_workers() -> None:
    assert "ApiService" in SERVICE["WorkerService"]["DependsOn"]


def test_workers_scale_by_their_demand_and_the_api_by_its_own_load() -> None:
    policies = {
        name: SERVICE[name]["Properties"]["TargetTrackingScalingPolicyConfiguration"]
        for name in ("WorkerScalingPolicy", "ApiScalingPolicy")
    }
    metric = policies["WorkerScalingPolicy"]["CustomizedMetricSpecification"]
    line = json.loads(metric_line(Demand(1, 2, 1), "a deployment", 0.0))
    (directive,) = line["_aws"]["CloudWatchMetrics"]

    assert metric["Namespace"] == directive["Namespace"]
    assert metric["MetricName"] in {item["Name"] for item in directive["Metrics"]}
    assert [item["Name"] for item in metric["Dimensions"]] == directive["Dimensions"][0]
    assert policies["WorkerScalingPolicy"]["TargetValue"] == 100 * demand.TARGET
    assert policies["ApiScalingPolicy"]["PredefinedMetricSpecification"] == {
        "PredefinedMetricType": "ECSServiceAverageCPUUtilization"
    }


def test_the_container_limit_of_a_worker_is_the_memory_of_its_task() -> None:
    (container,) = SERVICE["WorkerTask"]["Properties"]["ContainerDefinitions"]

    assert container["Memory"] == SERVICE["WorkerTask"]["Properties"]["Memory"]


def test_no_role_has_a_wildcard_action() -> None:
    for role in ("ExecutionRole", "ApiRole", "WorkerRole"):
        assert not {action for action in actions_of(role) if "*" in action}


@pytest.mark.parametrize("role", ["api", "worker"])
def test_every_granted_action_has_a_use_that_is_documented(role: str) -> None:
    granted = actions_of(f"{role.title()}Role")
    document = (AWS.parents[1] / "docs" / "deploy.md").read_text()
    rows = {f"| {role} | `{action}` | {use.purpose} |" for action, use in USES[role].items()}

    assert USES[role].keys() == granted
    assert {row for row in rows if row not in document} == set()


@pytest.mark.parametrize("name", ["data.yaml", "service.yaml"])
def test_every_parameter_is_documented(name: str) -> None:
    parameters = load(name)["Parameters"]
    document = (AWS.parents[1] / "docs" / "deploy.md").read_text()

    assert [item for item in parameters if not parameters[item].get("Description")] == []
    assert {item: _documented_default(item, document) for item in parameters} == {
        item: str(parameters[item].get("Default", "(required)")) or "empty" for item in parameters
    }


def _documented_default(parameter: str, document: str) -> str | None:
    row = re.search(rf"^\| `{parameter}` \| ([^|]*) \|", document, re.MULTILINE)
    return row and row[1].strip("`").replace("\\_", "_")


def test_the_costs_in_the_document_are_those_of_the_script() -> None:
    command = [sys.executable, str(AWS / "cost.py"), "--redis"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert printed in (AWS.parents[1] / "docs" / "deploy.md").read_text()


def test_the_costs_include_every_alarm_and_secret_of_the_templates() -> None:
    counts = Counter(resource["Type"] for resource in [*DATA.values(), *SERVICE.values()])
    inputs = runpy.run_path(str(AWS / "cost.py"))

    # Target tracking creates two alarms for each policy. One secret is created only with Redis.
    policies = counts["AWS::ApplicationAutoScaling::ScalingPolicy"]
    assert inputs["ALARMS"] == counts["AWS::CloudWatch::Alarm"] + 2 * policies
    assert inputs["SECRETS"] == counts["AWS::SecretsManager::Secret"] - 1
    assert counts["AWS::CloudWatch::Dashboard"] == 1


@pytest.mark.slow
def test_cfn_lint_accepts_the_templates() -> None:
    # W1030: the default of SubnetIds is empty; it is used only with an existing VPC.
    command = [
        find_program(SERVERS / "cfn-lint"),
        "-i",
        "W1030",
        "--",
        *map(str, AWS.glob("*.yaml")),
    ]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (0, "")
