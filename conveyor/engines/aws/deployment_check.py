"""Finds out what a deployment on AWS lacks, with calls that change nothing that is kept
(docs/deploy.md, Check a deployment).

Each probe makes the same API call as the program, with the same credentials. Conditions that
cannot hold keep the table unchanged. The row, the objects and the queue of a probe have names of
their own and are removed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from conveyor.domain.submit.target import Target
from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.dynamodb.items import Item
from conveyor.engines.aws.dynamodb.keys import INDEXES, PK, SK
from conveyor.engines.aws.dynamodb.table import insert_statement, is_inserted
from conveyor.engines.aws.errors import AwsError, NotAllowed
from conveyor.engines.aws.sqs import CONTROL, RUN_ATTRIBUTES, make, url_of
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool
from conveyor.ports.errors import BlobMissing, QueueGone, Unavailable
from conveyor.schemas.responses import Finding

# AWS refuses signatures that are more than five minutes off. Claims and leases of several
# processes compare times of their clocks within seconds.
CLOCK_S_MAX = 5.0
_INIT = "run `conveyor init`, or deploy deploy/aws/data.yaml"
_GRANT = "add it to the role of this process (deploy/aws/service.yaml has the policies)"


Probe = tuple[str, Callable[[], Awaitable[object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCheck:
    """Probes for one role. `probe_id` names what the probes create."""

    client: AwsClient
    table: str
    bucket: str
    queue_prefix: str
    probe_id: str

    async def run(self, role: str) -> list[Finding]:
        findings = [await self._probe(probe) for probe in self._table_probes()]
        findings += [await self._probe(probe) for probe in self._object_probes(role)]
        findings += await self._check_queues(role)
        if role == "worker":
            findings += [await self._probe(probe) for probe in self._workflow_probes()]
        return findings

    async def _probe(self, probe: Probe) -> Finding:
        name, make_call = probe
        try:
            await make_call()
        except NotAllowed as error:
            remedy = _INIT if error.code == "NoSuchBucket" else _GRANT
            return Finding(name, str(error), remedy)
        except QueueGone:
            return Finding(name, "the queue does not exist", _INIT)
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return Finding(name, f"the table {self.table} does not exist", _INIT)
            # Any other refusal comes after the check of permissions, such as a failed condition.
            return Finding(name)
        except BlobMissing:
            return Finding(name)
        except Unavailable as error:
            return Finding(name, str(error), "check the network, the endpoint and the region")
        return Finding(name)

    def _call(self, service: str, operation: str, **params: Any) -> Callable[[], Awaitable[Any]]:
        return lambda: self.client.call(service, operation, params)

    def _table_probes(self) -> list[Probe]:
        key = {PK: {"S": f"Check#{self.probe_id}"}, SK: {"S": "Check"}}
        # It cannot hold, because no row has this key.
        condition = {"ConditionExpression": f"attribute_exists({PK})"}
        at = {"TableName": self.table, "Key": key}
        put = {"TableName": self.table, "Item": key, **condition}
        check = {"ConditionCheck": {**at, **condition}}
        change = {
            "UpdateExpression": "SET checked = :one",
            "ExpressionAttributeValues": {":one": {"N": "1"}},
        }
        return [
            ("dynamodb:GetItem", self._call("dynamodb", "GetItem", **at)),
            (
                "dynamodb:BatchGetItem",
                self._call("dynamodb", "BatchGetItem", RequestItems={self.table: {"Keys": [key]}}),
            ),
            ("dynamodb:Query", self._query(PK)),
            *(
                (f"dynamodb:Query on {index.name}", self._query(index.pk, index.name))
                for index in INDEXES
            ),
            ("dynamodb:PutItem", self._call("dynamodb", "PutItem", **put)),
            (
                "dynamodb:UpdateItem",
                self._call("dynamodb", "UpdateItem", **at, **change, **condition),
            ),
            ("dynamodb:DeleteItem", self._call("dynamodb", "DeleteItem", **at, **condition)),
            (
                "dynamodb:BatchWriteItem",
                self._call(
                    "dynamodb",
                    "BatchWriteItem",
                    RequestItems={self.table: [{"DeleteRequest": {"Key": key}}]},
                ),
            ),
            ("dynamodb:PartiQLInsert", self._insert_and_delete(key)),
            (
                "dynamodb:ConditionCheckItem",
                self._call("dynamodb", "TransactWriteItems", TransactItems=[check]),
            ),
        ]

    def _insert_and_delete(self, key: Item) -> Callable[[], Awaitable[Any]]:
        # An INSERT takes no condition, so this probe writes a row and removes it.
        async def insert() -> None:
            params = {"Statements": [insert_statement(self.table, key)]}
            answer = await self.client.call("dynamodb", "BatchExecuteStatement", params)
            for response in answer["Responses"]:
                is_inserted(response.get("Error"))
            await self.client.call("dynamodb", "DeleteItem", {"TableName": self.table, "Key": key})

        return insert

    def _query(self, partition: str, index: str | None = None) -> Callable[[], Awaitable[Any]]:
        return self._call(
            "dynamodb",
            "Query",
            TableName=self.table,
            **({} if index is None else {"IndexName": index}),
            KeyConditionExpression=f"{partition} = :none",
            ExpressionAttributeValues={":none": {"S": f"Check#{self.probe_id}"}},
            Limit=1,
        )

    def _object_probes(self, role: str) -> list[Probe]:
        prefixes = ("jobs", "probes") if role == "worker" else ("sources", "inputs")
        probes: list[Probe] = [
            (
                "s3:ListBucket",
                self._call("s3", "ListObjectsV2", Bucket=self.bucket, Prefix="check/", MaxKeys=1),
            )
        ]
        for prefix in prefixes:
            at = {"Bucket": self.bucket, "Key": f"{prefix}/check-{self.probe_id}"}
            probes += [
                (f"s3:PutObject on {prefix}/", self._call("s3", "PutObject", **at, Body=b"check")),
                (f"s3:GetObject on {prefix}/", self._call("s3", "HeadObject", **at)),
                (f"s3:AbortMultipartUpload on {prefix}/", self._abort_upload(at)),
                (f"s3:DeleteObject on {prefix}/", self._call("s3", "DeleteObject", **at)),
            ]
        return probes

    def _abort_upload(self, at: dict[str, str]) -> Callable[[], Awaitable[Any]]:
        async def abort() -> None:
            upload = await self.client.call("s3", "CreateMultipartUpload", at)
            await self.client.call(
                "s3", "AbortMultipartUpload", {**at, "UploadId": upload["UploadId"]}
            )

        return abort

    async def _check_queues(self, role: str) -> list[Finding]:
        name = f"{self.queue_prefix}check-{self.probe_id}"
        control = f"{self.queue_prefix}{CONTROL}"
        finding = await self._probe(("sqs:GetQueueUrl", lambda: url_of(self.client, control)))
        try:
            url = await make(self.client, name, RUN_ATTRIBUTES)
        except NotAllowed as error:
            return [finding, Finding("sqs:CreateQueue", str(error), _GRANT)]
        except Unavailable as error:
            return [
                finding,
                Finding("sqs:CreateQueue", str(error), "check the network and the region"),
            ]
        probes = self._queue_probes(url, role)
        return [
            finding,
            Finding("sqs:CreateQueue"),
            *[await self._probe(probe) for probe in probes],
        ]

    def _queue_probes(self, url: str, role: str) -> list[Probe]:
        entry = {"Id": "0", "MessageBody": "check"}
        # No message has this receipt, so nothing is hidden or deleted.
        receipt = {"QueueUrl": url, "Entries": [{"Id": "0", "ReceiptHandle": "check"}]}
        hidden = {"Id": "0", "ReceiptHandle": "check", "VisibilityTimeout": 0}
        attributes = {"QueueUrl": url, "AttributeNames": ["ApproximateNumberOfMessages"]}
        of_workers: list[Probe] = [
            ("sqs:GetQueueAttributes", self._call("sqs", "GetQueueAttributes", **attributes)),
            ("sqs:ReceiveMessage", self._call("sqs", "ReceiveMessage", QueueUrl=url)),
            ("sqs:DeleteMessage", self._call("sqs", "DeleteMessageBatch", **receipt)),
            (
                "sqs:ChangeMessageVisibility",
                self._call("sqs", "ChangeMessageVisibilityBatch", QueueUrl=url, Entries=[hidden]),
            ),
        ]
        return [
            (
                "sqs:SendMessage",
                self._call("sqs", "SendMessageBatch", QueueUrl=url, Entries=[entry]),
            ),
            *(of_workers if role == "worker" else []),
            ("sqs:DeleteQueue", self._call("sqs", "DeleteQueue", QueueUrl=url)),
        ]

    def _workflow_probes(self) -> list[Probe]:
        # No execution waits for this token, so the call is refused after the check of permissions.
        token = {"taskToken": f"check-{self.probe_id}"}
        failure = {**token, "error": "Conveyor.check", "cause": "check"}
        return [
            (
                "states:SendTaskSuccess",
                self._call("stepfunctions", "SendTaskSuccess", **token, output="{}"),
            ),
            (
                "states:SendTaskFailure",
                self._call("stepfunctions", "SendTaskFailure", **failure),
            ),
        ]


async def check_clock(pool: HttpPool, endpoint: Target, now: Callable[[], float]) -> Finding:
    """Compares this machine's clock with the `Date` of an unsigned response of the service."""
    response = await pool.fetch(
        Request(method="GET", target=endpoint, partition="check", deadline_s=10.0)
    )
    date = response.header(b"date")
    if date is None:
        return Finding("clock")
    skew_s = parsedate_to_datetime(date).timestamp() - now()
    if abs(skew_s) <= CLOCK_S_MAX:
        return Finding("clock")
    return Finding(
        "clock",
        f"this machine's clock differs by {skew_s:.0f} s from {endpoint.host}",
        "synchronise the clock, for example with chrony",
    )
