"""Credentials of a container, a machine and a profile, which botocore requests from local servers
in place of the AWS services."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from trio.testing import MockClock

from conveyor.engines.aws.client.auth import CHECK_EVERY_S, find_access
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws_signature import Credentials

pytestmark = pytest.mark.slow

ROLE = "the-role"
METADATA = "/latest/meta-data/iam/security-credentials/"
RENEWED_AHEAD_S = 15 * 60  # This is the renewal margin of botocore.


class CredentialServer(ThreadingHTTPServer):
    """Returns new credentials at every request, valid for `lives_s`; none while it is closed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lives_s = 3600.0
        self.is_closed = False
        self.handed_out = 0
        self.bearers: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def keys(self) -> dict[str, str]:
        self.handed_out += 1
        until = datetime.now(UTC) + timedelta(seconds=self.lives_s)
        return {
            "Code": "Success",
            "AccessKeyId": f"key-{self.handed_out}",
            "SecretAccessKey": "secret",
            "Token": "token",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


class _Handler(BaseHTTPRequestHandler):
    server: CredentialServer

    def do_PUT(self) -> None:
        """Version 2 of the metadata service: a token is requested first."""
        self._respond(b"a-session")

    def do_GET(self) -> None:
        self.server.bearers.append(self.headers.get("Authorization"))
        if self.path == METADATA:
            self._respond(ROLE.encode())
        else:
            self._respond(json.dumps(self.server.keys()).encode())

    def _respond(self, body: bytes) -> None:
        self.send_response(503 if self.server.is_closed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def a_credential_server() -> Iterator[CredentialServer]:
    with CredentialServer() as credential_server:
        thread = threading.Thread(target=credential_server.serve_forever)
        thread.start()
        try:
            yield credential_server
        finally:
            credential_server.shutdown()
            thread.join()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without the AWS settings of this machine and without credentials."""
    for name in ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    return monkeypatch


@pytest.fixture
def credential_server() -> Iterator[CredentialServer]:
    with a_credential_server() as credential_server:
        yield credential_server


@pytest.fixture
def container(
    environment: pytest.MonkeyPatch, credential_server: CredentialServer
) -> CredentialServer:
    """Sets the variables that tell a Fargate task where the credentials of its role are."""
    environment.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{credential_server.url}/keys")
    environment.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "a-bearer")
    return credential_server


async def test_a_container_uses_the_credentials_of_its_role(container: CredentialServer) -> None:
    began_at = time.time()
    access = await find_access(time.time)

    keys = await access.credentials()

    assert (keys.access_key, keys.secret_key, keys.token) == ("key-1", "secret", "token")
    assert keys.expires_at == pytest.approx(began_at + container.lives_s, abs=30)
    assert set(container.bearers) == {"a-bearer"}


async def test_credentials_of_a_container_are_renewed_before_they_expire(
    container: CredentialServer, mock_clock: MockClock
) -> None:
    container.lives_s = RENEWED_AHEAD_S - 60
    access = await find_access(time.time)
    first = await access.credentials()

    mock_clock.jump(CHECK_EVERY_S)
    later = await access.credentials()

    assert later.access_key != first.access_key


async def test_valid_credentials_are_used_while_the_credential_service_is_unavailable(
    container: CredentialServer, mock_clock: MockClock
) -> None:
    container.lives_s = RENEWED_AHEAD_S - 60
    access = await find_access(time.time)
    first = await access.credentials()

    container.is_closed = True
    mock_clock.jump(CHECK_EVERY_S)

    assert await access.credentials() == first


async def test_without_the_credential_service_there_are_no_initial_credentials(
    container: CredentialServer,
) -> None:
    container.is_closed = True

    with pytest.raises(NoResponse):
        await find_access(time.time)


async def test_a_machine_uses_the_credentials_of_its_role(
    environment: pytest.MonkeyPatch, credential_server: CredentialServer
) -> None:
    environment.setenv("AWS_EC2_METADATA_DISABLED", "false")
    environment.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{credential_server.url}/")

    access = await find_access(time.time)

    assert (await access.credentials()).access_key == f"key-{credential_server.handed_out}"


async def test_a_profile_provides_its_credentials_and_region(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.delenv("AWS_DEFAULT_REGION")
    environment.setenv("AWS_PROFILE", "batch")
    (tmp_path / "config").write_text("[profile batch]\nregion = ap-south-1\n")
    (tmp_path / "credentials").write_text(
        "[batch]\naws_access_key_id = AKIA\naws_secret_access_key = secret\n"
    )

    access = await find_access(time.time)

    assert access.region == "ap-south-1"
    assert await access.credentials() == Credentials("AKIA", "secret")
