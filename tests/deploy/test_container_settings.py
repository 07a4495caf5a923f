"""Tests settings as a container platform injects them (docs/deploy.md, The image)."""

from __future__ import annotations

import pytest

from conveyor.config import BadSettings, settings_from
from conveyor.engines.aws.client.auth import find_access
from conveyor.engines.aws.errors import permission_for
from tests.cli.program import Program

KEYS = {"CONVEYOR_AUTH": "keys"}
STRONG, OTHER = "k3y-0123456789abcdef", "another-key-9876543210"


def test_api_keys_can_come_from_a_variable() -> None:
    settings = settings_from({**KEYS, "CONVEYOR_API_KEYS": f" {STRONG}\n{OTHER} "})

    assert settings.api_keys == {STRONG, OTHER}
    assert STRONG not in repr(settings)


@pytest.mark.parametrize("weak", ["short-key", "a" * 40])
def test_a_weak_key_is_refused_without_being_shown(weak: str) -> None:
    with pytest.raises(BadSettings, match="CONVEYOR_API_KEYS holds a weak key") as refused:
        settings_from({**KEYS, "CONVEYOR_API_KEYS": f"{STRONG} {weak}"})

    assert weak not in str(refused.value)


def test_api_keys_from_two_sources_are_refused() -> None:
    both = {"CONVEYOR_API_KEYS": STRONG, "CONVEYOR_API_KEYS_FILE": "keys"}

    with pytest.raises(BadSettings, match="cannot both be set"):
        settings_from({**KEYS, **both})


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-2"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-1"),
    ],
)
async def test_the_region_can_come_from_either_variable(
    variables: dict[str, str], region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in {**variables, **keys}.items():
        monkeypatch.setenv(name, value)

    access = await find_access(lambda: 0.0)

    assert access.region == region


@pytest.mark.parametrize(
    ("call", "message", "permission"),
    [
        (
            "sqs.SendMessageBatch",
            "is not authorized to perform: sqs:sendmessage",
            "sqs:SendMessage",
        ),
        (
            "s3.HeadObject",
            "Forbidden",
            "s3:GetObject, or s3:ListBucket if the object does not exist",
        ),
        (
            "s3.GetObject",
            "User x is not authorized to perform: s3:ListBucket on resource y",
            "s3:ListBucket",
        ),
        ("s3.CopyObject", "Access Denied", "s3:PutObject, or s3:GetObject on the source"),
        ("sqs.SendMessageBatch", "cannot perform: sqs:SendMessageBatch", "sqs:SendMessage"),
        ("s3.PutObject", "Access Denied", "s3:PutObject"),
        (
            "dynamodb.TransactWriteItems",
            "User x is not authorized to perform: dynamodb:UpdateItem on resource y",
            "dynamodb:UpdateItem",
        ),
        ("dynamodb.Query", "", "dynamodb:Query"),
        ("dynamodb.BatchExecuteStatement", "", "dynamodb:PartiQLInsert"),
        (
            "dynamodb.BatchExecuteStatement",
            "cannot perform: dynamodb:BatchExecuteStatement",
            "dynamodb:PartiQLInsert",
        ),
    ],
)
def test_a_refused_call_names_the_permission_that_it_needs(
    call: str, message: str, permission: str
) -> None:
    assert permission_for(call, message) == permission


@pytest.mark.slow
def test_a_health_check_fails_if_no_server_listens(program: Program) -> None:
    ended = program.run("health", CONVEYOR_PORT="1", CONVEYOR_HOST="0.0.0.0")

    assert ended.code == 2
    assert "127.0.0.1:1 does not answer" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_process_is_never_ready_if_its_engine_does_not_answer(
    program: Program, role: str
) -> None:
    """The process logs the cause and ends before it listens; the platform restarts it."""
    aws = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "eu-west-1"}
    names = {"CONVEYOR_TABLE": "t", "CONVEYOR_BUCKET": "b", "CONVEYOR_SECRET_KEY": "0f" * 32}

    ended = program.run(
        role,
        **aws,
        **names,
        AWS_ENDPOINT_URL="http://127.0.0.1:1",
        CONVEYOR_ENGINE="aws",
        CONVEYOR_PORT="0",
    )

    assert ended.code != 0
    assert "sqs.GetQueueUrl: connection refused" in ended.err
    assert "is listening" not in ended.err


@pytest.mark.slow
def test_a_check_names_what_an_embedded_deployment_lacks(program: Program) -> None:
    ended = program.run("check", CONVEYOR_SECRET_KEY="short")

    assert ended.code == 1
    assert "CONVEYOR_SECRET_KEY is weak" in ended.out
    assert "CONVEYOR_API_KEYS" in ended.out
    assert "ok       data directory" in ended.out
