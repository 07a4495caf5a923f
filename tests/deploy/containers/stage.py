"""A local AWS with both stacks, and the tasks of the service stack as containers.

A container gets exactly the environment, secrets, role credentials and restrictions of its task
definition. Only settings for a local machine are added: the address and the certificate of the
local AWS, its own ports, and permission to fetch from this machine.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session

from tests.deploy.templates import ROOT, load
from tests.servers import SERVERS, free_port, running

IMAGE = os.environ.get("CONVEYOR_TEST_IMAGE", "localhost/conveyor:test")
GATEWAY_IMAGE = os.environ.get("CONVEYOR_TEST_GATEWAY_IMAGE", "localhost/conveyor-gateway:test")
TOOLS = ROOT / ".venv-deploy" / "bin"
ACCOUNT, REGION = "111122223333", "us-east-1"
ULIMITS = ("--ulimit", "nofile=10000:10000", "--ulimit", "nproc=10000:10000")
PATIENCE_S = 300.0
NAME = "conveyor-test-"
# The action that the local AWS checks for a batch call, by the action that AWS checks.
_SENDS = {
    "sqs:SendMessage": "sqs:SendMessageBatch",
    "dynamodb:PartiQLInsert": "dynamodb:BatchExecuteStatement",
}
BATCHES = {
    "api": _SENDS,
    "worker": {
        **_SENDS,
        "sqs:DeleteMessage": "sqs:DeleteMessageBatch",
        "sqs:ChangeMessageVisibility": "sqs:ChangeMessageVisibilityBatch",
    },
}


def until(what: str, holds: Callable[[], Any]) -> Any:
    give_up_at = time.monotonic() + PATIENCE_S
    while not (value := holds()):
        assert time.monotonic() < give_up_at, f"{what} did not happen"
        time.sleep(0.2)
    return value


@dataclass(slots=True)
class Container:
    name: str
    port: int
    log: Path

    def stop(self, *, within_s: int = 120) -> None:
        """Sends SIGTERM, as ECS does, and waits for the end."""
        subprocess.run(
            ["podman", "stop", "--time", str(within_s), self.name], check=True, capture_output=True
        )

    def kill(self) -> None:
        """Ends the process without a warning."""
        subprocess.run(["podman", "kill", self.name], check=True, capture_output=True)

    def text(self) -> str:
        process = subprocess.run(
            ["podman", "logs", self.name], capture_output=True, text=True, check=False
        )
        return process.stdout + process.stderr


@dataclass(slots=True)
class Stage:
    folder: Path
    endpoint: str
    certificate: Path
    decisions: Path
    containers: list[Container] = field(default_factory=list)
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        """Returns the environment of an administrator of the account."""
        return {
            "PATH": f"{TOOLS}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "AWS_ACCESS_KEY_ID": ACCOUNT,
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CA_BUNDLE": str(self.certificate),
        }

    def client(self, service: str) -> Any:
        """Returns an administrator's client. The AWS CLI would need a second of CPU per call."""
        if service not in self._clients:
            session = botocore.session.get_session()
            self._clients[service] = session.create_client(
                service,
                region_name=REGION,
                endpoint_url=self.endpoint,
                verify=str(self.certificate),
                aws_access_key_id=ACCOUNT,
                aws_secret_access_key="local",
            )
        return self._clients[service]

    def deploy(self, *parameters: str) -> str:
        """Runs `deploy.sh` as an operator does. The local AWS does not offer autoscaling."""
        script = ROOT / "deploy" / "aws" / "deploy.sh"
        ended = subprocess.run(
            [str(script), "Autoscaling=false", *parameters],
            env={**self.environ, "IMAGE": IMAGE},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def allow_batches(self) -> None:
        """Allows the actions that only the local AWS checks for batch calls."""
        for role, actions in BATCHES.items():
            self.put_policy(role, "local-dialect", list(actions.values()))

    def put_policy(self, role: str, name: str, actions: list[str]) -> None:
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        self.put_document(role, name, {"Version": "2012-10-17", "Statement": [statement]})

    def put_document(self, role: str, name: str, document: dict[str, Any]) -> None:
        self.client("iam").put_role_policy(
            RoleName=self.role_name(role), PolicyName=name, PolicyDocument=json.dumps(document)
        )

    def document(self, role: str) -> dict[str, Any]:
        """Returns the policy of a role as CloudFormation created it."""
        response = self.client("iam").get_role_policy(
            RoleName=self.role_name(role), PolicyName=role
        )
        document: dict[str, Any] = response["PolicyDocument"]
        return document

    def role_name(self, role: str) -> str:
        name: str = self.definition(role)["taskRoleArn"].rpartition("/")[2]
        return name

    def outputs(self, stack: str) -> dict[str, str]:
        (response,) = self.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
        return {item["OutputKey"]: item["OutputValue"] for item in response["Outputs"]}

    def secret(self, name: str) -> str:
        arn = self.outputs("conveyor-data")[name]
        text: str = self.client("secretsmanager").get_secret_value(SecretId=arn)["SecretString"]
        return text

    @property
    def key(self) -> str:
        """The first API key."""
        return self.secret("ApiKeys").split()[0]

    def add_key(self, key: str) -> None:
        """Adds a key to those that CloudFormation generated, as an operator does."""
        arn, keys = self.outputs("conveyor-data")["ApiKeys"], self.secret("ApiKeys")
        self.client("secretsmanager").put_secret_value(SecretId=arn, SecretString=f"{keys} {key}")

    def definition(self, role: str) -> dict[str, Any]:
        response = self.client("ecs").describe_task_definition(taskDefinition=f"conveyor-{role}")
        definition: dict[str, Any] = response["taskDefinition"]
        return definition

    def credentials(self, role_arn: str) -> dict[str, str]:
        keys = self.client("sts").assume_role(RoleArn=role_arn, RoleSessionName="task")[
            "Credentials"
        ]
        return {
            "AWS_ACCESS_KEY_ID": keys["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": keys["SecretAccessKey"],
            "AWS_SESSION_TOKEN": keys["SessionToken"],
        }

    def task_environ(self, role: str, port: int) -> dict[str, str]:
        """Returns the environment that ECS would set, and settings for this machine."""
        definition = self.definition(role)
        (container,) = definition["containerDefinitions"]
        environ = {item["name"]: item["value"] for item in container["environment"]}
        # The local AWS drops the secrets of a task definition, so the template is read.
        (listed,) = load("service.yaml")["Resources"][f"{role.title()}Task"]["Properties"][
            "ContainerDefinitions"
        ]
        names = {"CONVEYOR_SECRET_KEY": "SecretKey"}
        keys = {"CONVEYOR_API_KEYS": "ApiKeys", "CONVEYOR_ADMIN_KEY": "AdminKey"}
        names |= {name: key for name, key in keys.items() if key in str(listed["Secrets"])}
        secrets = {variable: self.secret(name) for variable, name in names.items()}
        only_here = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CA_BUNDLE": "/ca.pem",
            "SSL_CERT_FILE": "/ca.pem",
            "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
            "CONVEYOR_AWS_TIMEOUT_S": "60",
            "CONVEYOR_METRICS_PORT" if role == "worker" else "CONVEYOR_PORT": str(port),
            "CONVEYOR_PUBLIC_URL": f"http://127.0.0.1:{port}",
            "CONVEYOR_TRUSTED_PROXIES": "",
        }
        return {**environ, **secrets, **self.credentials(definition["taskRoleArn"]), **only_here}

    def command(self, name: str, environ: dict[str, str], *, role: str) -> list[str]:
        (listed,) = load("service.yaml")["Resources"][f"{role.title()}Task"]["Properties"][
            "ContainerDefinitions"
        ]
        assert listed["ReadonlyRootFilesystem"] is True
        return [
            *("podman", "--runtime", "runc", "run", "--name", name, "--network", "host", "--init"),
            *("--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", *ULIMITS),
            *("--user", listed["User"], "--volume", f"{self.certificate}:/ca.pem:ro"),
            *(f"--env={variable}={value}" for variable, value in environ.items()),
        ]

    def start(self, role: str, **more: str) -> Container:
        port, name = free_port(), f"{NAME}{role}-{free_port()}"
        environ = {**self.task_environ(role, port), **more}
        container = Container(name, port, self.folder / f"{name}.log")
        command = [*self.command(name, environ, role=role), "--detach", IMAGE]
        subprocess.run(command, check=True, capture_output=True)
        self.containers.append(container)
        until(f"{name} to be ready", lambda: self._is_ready(container))
        return container

    def of_role(self, role: str) -> list[Container]:
        return [item for item in self.containers if item.name.startswith(f"{NAME}{role}-")]

    def restart_ended(self, role: str) -> None:
        """Restarts ended processes with the same name and port, as ECS does."""
        for container in self.of_role(role):
            if not self._is_ready(container):
                subprocess.run(["podman", "start", container.name], check=True, capture_output=True)
                until(f"{container.name} to be ready", partial(self._is_ready, container))

    def run(self, role: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end in a container of this role."""
        environ = {**self.task_environ(role, free_port()), **more}
        name = f"{NAME}run-{free_port()}"
        command = [*self.command(name, environ, role=role), "--rm", IMAGE, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def _is_ready(self, container: Container) -> bool:
        url = f"http://127.0.0.1:{container.port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def denials(self) -> list[str]:
        return [line for line in self._lines() if not line.startswith("Allow")]

    def used(self, role: str) -> Counter[str]:
        """Returns how often a role used each of its actions."""
        name = self.role_name(role)
        used: Counter[str] = Counter()
        for line in self._lines():
            decision, principal, action, _ = line.split(" ", 3)
            if decision == "Allow" and principal == name:
                used[action] += 1
        return used

    def _lines(self) -> list[str]:
        return self.decisions.read_text().splitlines()

    def end(self) -> None:
        for container in self.containers:
            container.log.write_text(container.text())
            subprocess.run(
                ["podman", "rm", "-f", "-t", "0", container.name], capture_output=True, check=False
            )
        self.containers.clear()


@contextmanager
def a_stage(folder: Path) -> Iterator[Stage]:
    port = free_port()
    certificate = _make_certificate(folder)
    decisions = folder / "decisions"
    decisions.touch()
    environ = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "AUTH": "true",
        "USE_SSL": "1",
        "MINISTACK_SSL_CERT": str(certificate),
        "MINISTACK_SSL_KEY": str(folder / "key.pem"),
        "DECISIONS": str(decisions),
    }
    command = [str(SERVERS / "python"), str(Path(__file__).with_name("recording_ministack.py"))]
    with running(command, folder / "aws", _answers_tls(port), environ):
        stage = Stage(folder, f"https://127.0.0.1:{port}", certificate, decisions)
        try:
            yield stage
        finally:
            stage.end()


def _answers_tls(port: int) -> Callable[[], bool]:
    context = ssl._create_unverified_context()

    def ask() -> bool:
        url = f"https://127.0.0.1:{port}/_ministack/health"
        try:
            with urllib.request.urlopen(url, timeout=2, context=context):
                return True
        except OSError:
            return False

    return ask


def _make_certificate(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    certificate = folder / "ca.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(folder / "key.pem"), "-out", str(certificate), "-subj", "/CN=local"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    folder.chmod(0o755)
    certificate.chmod(0o644)
    return certificate
