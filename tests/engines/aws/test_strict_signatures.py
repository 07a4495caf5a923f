"""A DynamoDB that checks signatures takes ours, and nobody else's."""

from __future__ import annotations

import pytest

from conveyor.engines.aws.boto import open_boto_plane
from conveyor.engines.aws.credentials import GivenAccess
from conveyor.engines.aws.errors import NotAllowed
from conveyor.engines.aws.signing import Credentials
from tests.aws import REGION, a_lean_plane, a_seam, an_access

pytestmark = pytest.mark.slow

ALLOW_ALL = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'


async def a_user(url: str, name: str) -> Credentials:
    """Keys of a user who may do anything: only those of users are checked."""
    async with open_boto_plane(an_access(iam=url)) as plane:
        iam = a_seam(plane)
        await iam.call("iam", "CreateUser", {"UserName": name})
        policy = {"UserName": name, "PolicyName": "all", "PolicyDocument": ALLOW_ALL}
        await iam.call("iam", "PutUserPolicy", policy)
        made = (await iam.call("iam", "CreateAccessKey", {"UserName": name}))["AccessKey"]
        return Credentials(made["AccessKeyId"], made["SecretAccessKey"])


async def test_our_signature_is_taken_where_signatures_are_checked(strict_ministack: str) -> None:
    keys = await a_user(strict_ministack, "honest")
    access = GivenAccess(REGION, keys, {"dynamodb": strict_ministack})

    async with a_lean_plane(access) as plane:
        answer = await a_seam(plane).call("dynamodb", "ListTables", {})

    assert answer == {"TableNames": []}


async def test_a_wrong_secret_is_refused_by_dynamodb(strict_ministack: str) -> None:
    keys = await a_user(strict_ministack, "thief")
    wrong = Credentials(keys.access_key, "guessed")
    access = GivenAccess(REGION, wrong, {"dynamodb": strict_ministack})

    async with a_lean_plane(access) as plane:
        with pytest.raises(NotAllowed) as caught:
            await a_seam(plane).call("dynamodb", "ListTables", {})

    assert caught.value.code == "InvalidSignatureException"
