"""Table: DynamoDB's own verbs, each until it is done: leftovers are sent again
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from conveyor.domain.changes import AnyKey
from conveyor.domain.randomness import Random
from conveyor.engines.aws.dynamo.expressions import Params, codec_for, key_item
from conveyor.engines.aws.dynamo.items import Item
from conveyor.engines.aws.dynamo.lanes import Lanes, Shard, write_shards
from conveyor.engines.aws.dynamo.layout import PK, SK, Place, place_of
from conveyor.engines.aws.dynamo.together import slices, together
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.metering import Meter
from conveyor.engines.aws.retrying import ATTEMPTS_MAX, backoff_s
from conveyor.engines.aws.seam import Seam
from conveyor.ports.damage import DamageLog
from conveyor.ports.errors import Unavailable

READ_MAX = 100
WRITTEN_MAX = 25
ATOMIC_MAX = 100
ROUNDS_MAX = 8
ROUNDS_S_MAX = 20.0

REFUSED = "ConditionalCheckFailedException"
THROTTLED = "ProvisionedThroughputExceededException"
CANCELLED = "TransactionCanceledException"
INVALID = "ValidationException"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`meter` counts the rows that were read for the rows that were asked for; `lanes` remembers
    what each shard can take, `damage` which rows were left out."""

    name: str
    seam: Seam
    random: Random
    meter: Meter = field(default_factory=Meter)
    lanes: Lanes = field(default_factory=Lanes)
    damage: DamageLog = field(default_factory=DamageLog)

    async def call(
        self, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> dict[str, Any]:
        return await self.seam.call("dynamodb", operation, params, attempts_max=attempts_max)

    async def get(self, key: AnyKey) -> Any:
        """The row as of its last commit, or None."""
        params = {
            "TableName": self.name,
            "Key": key_item(place_of(key)),
            "ConsistentRead": True,
        }
        item = (await self.call("GetItem", params)).get("Item")
        return None if item is None else codec_for(key).from_item(item)

    async def get_all(self, keys: Sequence[AnyKey]) -> dict[AnyKey, Any]:
        """The rows that are there, as of their last commits."""
        wanted = list(dict.fromkeys(keys))
        if len(wanted) == 1:
            row = await self.get(wanted[0])
            return {} if row is None else {wanted[0]: row}
        found = await self.get_items([place_of(key) for key in wanted])
        return {
            key: codec_for(key).from_item(item)
            for key in wanted
            if (item := found.get(place_of(key))) is not None
        }

    async def get_items(self, places: Iterable[Place]) -> dict[Place, Item]:
        """A place may be named twice here; DynamoDB would refuse to be asked so."""
        wanted = list(dict.fromkeys(places))
        pages = await together(self._get_slice, slices(wanted, READ_MAX)) if wanted else []
        return {place_in(item): item for page in pages for item in page}

    async def _get_slice(self, places: Sequence[Place]) -> list[Item]:
        found: list[Item] = []
        keys = [key_item(place) for place in places]

        async def ask() -> bool:
            asked = {self.name: {"Keys": list(keys), "ConsistentRead": True}}
            answer = await self.call("BatchGetItem", {"RequestItems": asked})
            found.extend(answer.get("Responses", {}).get(self.name, ()))
            keys[:] = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", ())
            return not keys

        await self._until_done(ask)
        return found

    async def remove(self, places: Sequence[Place]) -> None:
        """Removes items, whatever they hold."""
        if wanted := list(dict.fromkeys(places)):
            await together(self._remove_slice, slices(wanted, WRITTEN_MAX))

    async def _remove_slice(self, places: Sequence[Place]) -> None:
        requests = [{"DeleteRequest": {"Key": key_item(place)}} for place in places]

        async def ask() -> bool:
            asked = {self.name: list(requests)}
            answer = await self.call("BatchWriteItem", {"RequestItems": asked})
            requests[:] = answer.get("UnprocessedItems", {}).get(self.name, ())
            return not requests

        await self._until_done(ask)

    async def remove_from_shards(self, places: Sequence[Place]) -> None:
        """Removes items of many partitions, each at the pace that it takes."""
        by_shard: dict[str, list[Place]] = {}
        for place in dict.fromkeys(places):
            by_shard.setdefault(place[0], []).append(place)
        work: dict[Shard, deque[list[Place]]] = {
            ("remove", shard): deque(map(list, slices(its, WRITTEN_MAX)))
            for shard, its in by_shard.items()
        }
        await write_shards(self.lanes, work, self._remove_once, self.random)

    async def _remove_once(self, places: list[Place]) -> None:
        """What the table left undone is what is left of `places`."""
        requests = [{"DeleteRequest": {"Key": key_item(place)}} for place in places]
        asked = {"RequestItems": {self.name: requests}}
        answer = await self.call("BatchWriteItem", asked, attempts_max=1)
        undone = answer.get("UnprocessedItems", {}).get(self.name, ())
        if undone:
            places[:] = [place_in(each["DeleteRequest"]["Key"]) for each in undone]
            raise Unavailable("some were left undone") from AwsError(THROTTLED, "left undone")

    async def write(
        self, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Item | None:
        """The item as written, if it was asked for; None when its condition did not hold."""
        try:
            answer = await self.call(operation, params, attempts_max=attempts_max)
        except AwsError as error:
            if error.code == REFUSED:
                return None
            raise
        attributes: Item = answer.get("Attributes", {})
        return attributes

    async def write_together(self, steps: Sequence[dict[str, Params]]) -> list[int] | None:
        """Writes all or nothing: None when done, else the steps whose conditions did not hold.

        The token is new for every call and the same for its retries: a lost answer costs nothing,
        and a change that is made twice on purpose is made twice.
        """
        assert len(steps) <= ATOMIC_MAX, "more than one transaction takes"
        token = f"{self.random.getrandbits(128):032x}"
        params = {"TransactItems": list(steps), "ClientRequestToken": token}
        try:
            await self.call("TransactWriteItems", params)
        except AwsError as error:
            if error.code != CANCELLED:
                raise
            failed = [n for n, why in enumerate(error.reasons) if why == "ConditionalCheckFailed"]
            if failed:
                return failed
            if any(why == "ValidationError" for why in error.reasons):
                raise
            raise Unavailable(str(error)) from error
        return None

    async def _until_done(self, ask: Callable[[], Any]) -> None:
        ends_at = trio.current_time() + ROUNDS_S_MAX
        for number in range(ROUNDS_MAX):
            if await ask():
                return
            if trio.current_time() >= ends_at:
                break
            await trio.sleep(backoff_s(number, self.random))
        raise Unavailable("the table keeps leaving something undone")


def place_in(item: Item) -> Place:
    return item[PK]["S"], item[SK]["S"]
