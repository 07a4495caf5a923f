"""A DynamoDB server that verifies signatures accepts those of the client and rejects others."""

from __future__ import annotations

import pytest

from conveyor.engines.aws.client.auth import StaticAccess
from conveyor.engines.aws.client.boto_transport import open_boto_transport
from conveyor.engines.aws.errors import NotAllowed
from conveyor.engines.aws_signature import Credentials
from tests.aws import REGION, an_access, an_aws_client, an_http_transport

pytestmark = pytest.mark.slow

ALLOW_ALL = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'


async def a_user(url: str, name: str) -> Credentials:
    """The keys of a user with all permissions. The server verifies only the signatures of users."""
    async with open_boto_transport(an_access(iam=url)) as transport:
        iam = an_aws_client(transport)
        await iam.call("iam", "CreateUser", {"UserName": name})
        policy = {"UserName": name, "PolicyName": "all", "PolicyDocument": ALLOW_ALL}
        await iam.call("iam", "PutUserPolicy", policy)
        key = (await iam.call("iam", "CreateAccessKey", {"UserName": name}))["AccessKey"]
        return Credentials(key["AccessKeyId"], key["SecretAccessKey"])


async def test_a_signature_of_the_client_is_accepted_by_a_server_that_verifies_it(
    strict_ministack: str,
) -> None:
    keys = await a_user(strict_ministack, "honest")
    access = StaticAccess(REGION, keys, {"dynamodb": strict_ministack})

    async with an_http_transport(access) as transport:
        answer = await an_aws_client(transport).call("dynamodb", "ListTables", {})

    assert answer == {"TableNames": []}


async def test_a_wrong_secret_is_refused_by_dynamodb(strict_ministack: str) -> None:
    keys = await a_user(strict_ministack, "thief")
    wrong = Credentials(keys.access_key, "guessed")
    access = StaticAccess(REGION, wrong, {"dynamodb": strict_ministack})

    async with an_http_transport(access) as transport:
        with pytest.raises(NotAllowed) as caught:
            await an_aws_client(transport).call("dynamodb", "ListTables", {})

    assert caught.value.code == "InvalidSignatureException"
