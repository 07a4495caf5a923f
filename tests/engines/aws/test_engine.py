"""The secret check in the table: the first process writes it, and every other process must be able
to decrypt it."""

from __future__ import annotations

import pytest
import trio

from conveyor.engines.aws.engine import SecretRow
from conveyor.engines.system import AesSecretBox
from conveyor.ports.secret_box import WrongSecret
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.conformance.coordinators import a_space, a_table_of_leases

pytestmark = pytest.mark.slow

OURS, OTHER = AesSecretBox(b"a" * 32), AesSecretBox(b"b" * 32)


async def test_another_secret_is_refused_and_concurrent_first_starts_agree(ministack: str) -> None:
    table = a_space()
    async with an_http_transport(an_access(dynamodb=ministack)) as transport:
        client = an_aws_client(transport)
        await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
        row = SecretRow(client, table)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(row.check, OURS)
        with pytest.raises(WrongSecret, match="CONVEYOR_SECRET_KEY"):
            await row.check(OTHER)

        await row.check(OURS)
