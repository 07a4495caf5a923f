"""The secret check of the AWS engine: a row of the table that only the right secret opens
(SPEC.md 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.seam import Seam
from conveyor.ports.vault import Vault, WrongSecret, make_check, opens_check

_KEY = {"pk": {"S": "SecretCheck"}, "sk": {"S": "SecretCheck"}}
_REFUSED = "ConditionalCheckFailedException"


@dataclass(frozen=True, slots=True)
class SecretRow:
    seam: Seam
    table: str

    async def check(self, vault: Vault) -> None:
        """WrongSecret when the table was sealed with another; the first process makes the row."""
        check = await self._read()
        if check is None:
            await self._write(make_check(vault))
            check = await self._read()
        if check is not None and not opens_check(vault, check):
            raise WrongSecret(
                f"the table {self.table} was sealed with another secret key: set "
                "CONVEYOR_SECRET_KEY to the one that its other processes have"
            )

    async def _read(self) -> str | None:
        params = {"TableName": self.table, "Key": _KEY, "ConsistentRead": True}
        item = (await self.seam.call("dynamodb", "GetItem", params)).get("Item")
        return None if item is None else str(item["check"]["S"])

    async def _write(self, check: str) -> None:
        """The first one counts."""
        params = {
            "TableName": self.table,
            "Item": _KEY | {"check": {"S": check}},
            "ConditionExpression": "attribute_not_exists(pk)",
        }
        try:
            await self.seam.call("dynamodb", "PutItem", params)
        except AwsError as error:
            if error.code != _REFUSED:
                raise
