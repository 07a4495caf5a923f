"""Runs the linters of their formats on the files of deploy/.

Every finding of checkov is fixed, or accepted here with its reason. An accepted finding that no
longer occurs fails the test too. `make test-deploy` installs the tools.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.templates import ROOT, load, resolve

pytestmark = pytest.mark.slow

CHECKOV = ROOT / ".venv-checkov" / "bin" / "checkov"
TOOLS = ROOT / ".venv-deploy" / "bin"
DEPLOY = ROOT / "deploy"
_Ended = subprocess.CompletedProcess[str]

_OWN_KEYS = (
    "encrypted with a key of AWS; a customer key costs 1 USD a month and a price for each call, "
    "and stops no principal that the IAM policies allow"
)
_PULL = "tags never change, and a pod must be able to restart while the registry is unavailable"
_ENVIRONMENT = "the program reads its secrets from the environment, as ECS injects them"
_PLAIN = "only without CertificateArn: for a proxy in front, or Scheme=internal"
# (check, resource): why it is accepted.
ACCEPTED = {
    ("CKV_AWS_119", "AWS::DynamoDB::Table.Table"): _OWN_KEYS,
    ("CKV_AWS_149", "AWS::SecretsManager::Secret.SecretKey"): _OWN_KEYS,
    ("CKV_AWS_149", "AWS::SecretsManager::Secret.ApiKeys"): _OWN_KEYS,
    ("CKV_AWS_149", "AWS::SecretsManager::Secret.AdminKey"): _OWN_KEYS,
    ("CKV_AWS_149", "AWS::SecretsManager::Secret.RedisToken"): _OWN_KEYS,
    ("CKV_AWS_149", "AWS::SecretsManager::Secret.RedisUrl"): _OWN_KEYS,
    ("CKV_AWS_158", "AWS::Logs::LogGroup.ApiLog"): _OWN_KEYS,
    ("CKV_AWS_158", "AWS::Logs::LogGroup.WorkerLog"): _OWN_KEYS,
    ("CKV_AWS_27", "AWS::SQS::Queue.ControlQueue"): (
        "SqsManagedSseEnabled encrypts it; the check looks for a customer key only"
    ),
    ("CKV_AWS_27", "AWS::SQS::Queue.DeadQueue"): (
        "SqsManagedSseEnabled encrypts it; the check looks for a customer key only"
    ),
    ("CKV_AWS_18", "AWS::S3::Bucket.Bucket"): (
        "two objects for each page would cost more log than body; CloudTrail data events record "
        "access where that is required"
    ),
    ("CKV_AWS_21", "AWS::S3::Bucket.Bucket"): (
        "a body is written once under its own name, and versions would keep what a caller deleted"
    ),
    ("CKV_AWS_91", "AWS::ElasticLoadBalancingV2::LoadBalancer.Balancer"): (
        "the API logs every request with its id, and this stack contains no data"
    ),
    ("CKV_AWS_260", "AWS::EC2::SecurityGroup.BalancerGroup"): (
        "a public API; AllowedCidr narrows it, and with TLS port 80 only redirects"
    ),
    ("CKV_AWS_2", "AWS::ElasticLoadBalancingV2::Listener.PlainListener"): _PLAIN,
    ("CKV_AWS_103", "AWS::ElasticLoadBalancingV2::Listener.PlainListener"): _PLAIN,
    ("CKV_DOCKER_7", "/Dockerfile.FROM"): "the tag is in the build argument BASE, with its version",
    ("CKV_K8S_11", "Deployment.conveyor.api"): (
        "a CPU limit stops the event loop for parts of each 100 ms; the request bounds its share"
    ),
    ("CKV_K8S_11", "Deployment.conveyor.worker"): (
        "a CPU limit stops the event loop for parts of each 100 ms; the request bounds its share"
    ),
    ("CKV_K8S_11", "Deployment.conveyor.gateway"): (
        "a CPU limit would slow the browsers of all pages; the request bounds its share"
    ),
    ("CKV_K8S_15", "Deployment.conveyor.gateway"): _PULL,
    ("CKV_K8S_15", "Deployment.conveyor.api"): _PULL,
    ("CKV_K8S_15", "Deployment.conveyor.worker"): _PULL,
    ("CKV_K8S_35", "Deployment.conveyor.api"): _ENVIRONMENT,
    ("CKV_K8S_35", "Deployment.conveyor.worker"): _ENVIRONMENT,
    ("CKV_K8S_43", "Deployment.conveyor.gateway"): (
        "the operator writes the image of its own registry"
    ),
    ("CKV_K8S_43", "Deployment.conveyor.api"): "the operator writes the image of its own registry",
    ("CKV_K8S_43", "Deployment.conveyor.worker"): (
        "the operator writes the image of its own registry"
    ),
}


def _lint(program: str | Path, *arguments: str, text: str | None = None) -> _Ended:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: make test-deploy installs it")
    command = [path, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_checkov_reports_only_accepted_findings() -> None:
    frameworks = ("cloudformation", "dockerfile", "kubernetes")

    # --skip-download: otherwise the tool downloads texts from its vendor.
    offline = ("--skip-download", "--output", "json")
    ended = _lint(CHECKOV, "-d", str(DEPLOY), *offline, "--framework", *frameworks)

    reports = json.loads(ended.stdout)
    assert {report["check_type"] for report in reports} == set(frameworks)
    assert [report["results"]["parsing_errors"] for report in reports] == [[], [], []]
    findings = {
        (finding["check_id"], finding["resource"])
        for report in reports
        for finding in report["results"]["failed_checks"]
    }
    assert findings == ACCEPTED.keys()


def test_hadolint_accepts_the_image() -> None:
    ended = _lint(TOOLS / "hadolint", str(DEPLOY / "Dockerfile"))

    assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.parametrize("role", ["ExecutionRole", "ApiRole", "WorkerRole"])
def test_parliament_accepts_the_policy_of_each_role(role: str) -> None:
    """Checks that the actions exist and apply to the kind of their resources."""
    (policy,) = load("service.yaml")["Resources"][role]["Properties"]["Policies"]
    document = json.dumps(resolve(policy["PolicyDocument"]))

    ended = _lint(TOOLS / "parliament", "--json", text=document)

    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.parametrize("name", ["conveyor.yaml", "gateway.yaml"])
def test_the_manifests_fit_the_schemas_of_kubernetes(name: str) -> None:
    manifests = str(DEPLOY / "kubernetes" / name)

    ended = _lint(TOOLS / "kubernetes-validate", "--strict", "-k", "1.31", manifests)

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_caddy_accepts_its_configuration() -> None:
    ended = _lint("caddy", "validate", "--config", str(DEPLOY / "box/Caddyfile"))

    assert ended.returncode == 0, ended.stderr


def test_the_unit_is_valid_and_its_exposure_is_low() -> None:
    unit = str(DEPLOY / "box/conveyor.service")

    verified = _lint("systemd-analyze", "verify", unit)
    # The exposure goes from 0 to 100; systemd rates everything up to 20 as safe.
    rated = _lint("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)

    # The program of the unit is not installed on the machine of the test.
    complaints = [line for line in verified.stderr.splitlines() if "is not executable" not in line]
    assert complaints == []
    assert rated.returncode == 0, rated.stdout
