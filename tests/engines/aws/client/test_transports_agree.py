"""Both transports send equivalent calls to the same servers and return the same answers."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from conveyor.engines.aws.client.auth import StaticAccess
from conveyor.engines.aws.client.boto_transport import open_boto_transport
from conveyor.engines.aws.client.client import AwsClient, RetryingAwsClient
from conveyor.engines.aws.dynamodb.table import insert_statement
from conveyor.engines.aws.errors import AwsError, NotAllowed
from conveyor.engines.aws_signature import Credentials
from conveyor.ports.errors import BlobMissing, QueueGone, Unavailable
from tests.aws import TRANSPORTS, an_access, an_aws_client, an_http_transport
from tests.servers import ACCESS_KEY

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()
# Fields that differ between any two calls.
FLEETING = frozenset(
    {"LastModified", "MessageId", "ReceiptHandle", "StorageClass", "TableName", "UploadId"}
)
# Fields that only botocore returns: copies of the request, and values that no caller needs.
ECHOES = frozenset(
    {
        "AcceptRanges", "Bucket", "ContentType", "Delimiter", "EncodingType", "Key", "Location",
        "MaxKeys", "Name", "Prefix", "QueueUrl",
    }
)  # fmt: skip


def without_volatile(value: Any) -> Any:
    """Returns an answer without the fields that differ from call to call."""
    if isinstance(value, dict):
        return {key: without_volatile(inner) for key, inner in value.items() if key not in FLEETING}
    return [without_volatile(inner) for inner in value] if isinstance(value, list) else value


class CallRecorder:
    """Makes calls one after the other and records their outcomes."""

    def __init__(self, client: AwsClient, service: str) -> None:
        self.client = client
        self.service = service
        self.outcomes: list[Any] = []

    async def __call__(self, operation: str, **params: Any) -> dict[str, Any]:
        try:
            answer = await self.client.call(self.service, operation, params)
        except AwsError as error:
            self.outcomes.append((operation, error.code, error.status, error.reasons))
            return {}
        except (BlobMissing, QueueGone, Unavailable) as error:
            self.outcomes.append((operation, type(error).__name__))
            return {}
        rest = {key: value for key, value in answer.items() if key not in ECHOES}
        self.outcomes.append((operation, without_volatile(rest)))
        return answer


@pytest.fixture
async def clients(
    request: pytest.FixtureRequest, access: StaticAccess
) -> AsyncGenerator[dict[str, RetryingAwsClient], None]:
    async with an_http_transport(access) as lean, open_boto_transport(access) as boto:
        yield {"lean": an_aws_client(lean), "boto": an_aws_client(boto)}


@pytest.fixture
def access(request: pytest.FixtureRequest) -> StaticAccess:
    service = request.param
    server = {"dynamodb": "ministack", "sqs": "localstack", "s3": "seaweed"}[service]
    return an_access(**{service: request.getfixturevalue(server)})


def over(service: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("access", [service], indirect=True)


async def a_table(client: AwsClient) -> str:
    name = f"table-{next(NUMBERS)}"
    await client.call(
        "dynamodb",
        "CreateTable",
        {
            "TableName": name,
            "BillingMode": "PAY_PER_REQUEST",
            "KeySchema": [
                {"AttributeName": "pk", "KeyType": "HASH"},
                {"AttributeName": "sk", "KeyType": "RANGE"},
            ],
            "AttributeDefinitions": [
                {"AttributeName": "pk", "AttributeType": "S"},
                {"AttributeName": "sk", "AttributeType": "S"},
            ],
        },
    )
    return name


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"pk": {"S": "p"}, "sk": {"S": f"{number:03}"}, **more}


@over("dynamodb")
async def test_both_transports_return_the_same_answers_of_dynamodb(
    clients: dict[str, RetryingAwsClient],
) -> None:
    outcomes = {}
    for name, client in clients.items():
        table = await a_table(clients["boto"])
        do = CallRecorder(client, "dynamodb")
        values = {
            "B": {"S": "an attribute called B"},
            "raw": {"B": b"\x00\xff"},
            "raws": {"BS": [b"\x01"]},
            "n": {"N": "12"},
            "deep": {"M": {"l": {"L": [{"BOOL": True}, {"NULL": True}, {"S": "é☃"}]}}},
        }
        once = {"ConditionExpression": "attribute_not_exists(pk)"}
        await do("PutItem", TableName=table, Item=row(1, **values), **once)
        await do("PutItem", TableName=table, Item=row(1), **once)
        await do("GetItem", TableName=table, Key=row(1), ConsistentRead=True)
        await do("GetItem", TableName=table, Key=row(99))
        await do(
            "UpdateItem",
            TableName=table,
            Key=row(1),
            UpdateExpression="SET n = n + :one",
            ConditionExpression="n = :was",
            ExpressionAttributeValues={":one": {"N": "1"}, ":was": {"N": "12"}},
            ReturnValues="ALL_NEW",
        )
        puts = [{"PutRequest": {"Item": row(n, size={"N": str(n)})}} for n in range(2, 20)]
        await do("BatchWriteItem", RequestItems={table: puts})
        inserts = [insert_statement(table, row(n)) for n in (2, 60)]
        await do("BatchExecuteStatement", Statements=inserts)
        page = await do(
            "Query",
            TableName=table,
            KeyConditionExpression="pk = :p",
            ExpressionAttributeValues={":p": {"S": "p"}},
            Limit=7,
        )
        await do(
            "Query",
            TableName=table,
            KeyConditionExpression="pk = :p",
            ExpressionAttributeValues={":p": {"S": "p"}},
            ExclusiveStartKey=page["LastEvaluatedKey"],
        )
        put = {"Put": {"TableName": table, "Item": row(50)}}
        refused = {"Put": {"TableName": table, "Item": row(2), **once}}
        await do("TransactWriteItems", TransactItems=[put], ClientRequestToken=f"t-{table}")
        await do("TransactWriteItems", TransactItems=[put, refused])
        await do("DeleteItem", TableName=table, Key=row(3), ReturnValues="ALL_OLD")
        await do("GetItem", TableName="no-such-table", Key=row(1))
        outcomes[name] = do.outcomes

    assert outcomes["lean"] == outcomes["boto"]
    assert len(outcomes["lean"]) == 13


@over("sqs")
async def test_both_transports_return_the_same_answers_of_sqs(
    clients: dict[str, RetryingAwsClient],
) -> None:
    outcomes = {}
    for name, client in clients.items():
        do = CallRecorder(client, "sqs")
        url = (await do("CreateQueue", QueueName=f"queue-{next(NUMBERS)}"))["QueueUrl"]
        await do("SendMessage", QueueUrl=url, MessageBody="ünï☃ <&>")
        entries = [{"Id": str(n), "MessageBody": f"body {n}"} for n in range(10)]
        await do("SendMessageBatch", QueueUrl=url, Entries=entries[:1])
        got = await do(
            "ReceiveMessage",
            QueueUrl=url,
            MaxNumberOfMessages=1,
            MessageSystemAttributeNames=["ApproximateReceiveCount"],
        )
        receipt = got["Messages"][0]["ReceiptHandle"]
        await do(
            "ChangeMessageVisibility", QueueUrl=url, ReceiptHandle=receipt, VisibilityTimeout=60
        )
        await do("DeleteMessage", QueueUrl=url, ReceiptHandle=receipt)
        await do("DeleteMessage", QueueUrl=url, ReceiptHandle=receipt)
        await do("DeleteMessageBatch", QueueUrl=url, Entries=[{"Id": "a", "ReceiptHandle": "no"}])
        await do("DeleteQueue", QueueUrl=url)
        await do("ReceiveMessage", QueueUrl=url)
        await do("GetQueueUrl", QueueName="no-such-queue")
        outcomes[name] = do.outcomes

    assert outcomes["lean"] == outcomes["boto"]
    assert outcomes["lean"][-1] == ("GetQueueUrl", "QueueGone")


async def a_bucket(client: AwsClient) -> str:
    name = f"bucket-{next(NUMBERS)}"
    await client.call("s3", "CreateBucket", {"Bucket": name})
    return name


KEYS = ("plain", "a b+c%20&=?#.txt", "é/☃/~!*'()", "deep/er/..dots", "q;@:$,[x]")


async def pieces_of(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


@over("s3")
async def test_both_transports_return_the_same_answers_of_s3(
    clients: dict[str, RetryingAwsClient],
) -> None:
    outcomes = {}
    for name, client in clients.items():
        bucket = await a_bucket(clients["boto"])
        do = CallRecorder(client, "s3")
        for key in KEYS:
            at = {"Bucket": bucket, "Key": key}
            await do("PutObject", **at, Body=key.encode(), Metadata={"who": "me"})
            await do("HeadObject", **at)
            await do("GetObject", **at, Range="bytes=1-3")
        packed = {"Bucket": bucket, "Key": "packed"}
        await do(
            "PutObject", **packed, Body=gzip.compress(b"list", mtime=0), ContentEncoding="gzip"
        )
        await do("GetObject", **packed)
        at = {"Bucket": bucket, "Key": "once"}
        etag = (await do("PutObject", **at, Body=b"one", IfNoneMatch="*"))["ETag"]
        await do("PutObject", **at, Body=b"two", IfNoneMatch="*")
        await do("GetObject", **at, IfMatch=etag)
        await do("GetObject", **at, IfMatch='"other"')
        await do("HeadObject", Bucket=bucket, Key="nothing")
        await do("GetObject", Bucket=bucket, Key="nothing")
        await do("ListObjectsV2", Bucket=bucket, MaxKeys=2)
        await do("ListObjectsV2", Bucket=bucket, Prefix="deep/", Delimiter="/")
        await do(
            "CopyObject", Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": KEYS[1]}
        )
        await do("GetObject", Bucket=bucket, Key="copy")
        await upload_in_parts(do, bucket)
        doomed = [{"Key": key} for key in (*KEYS, "once", "packed")]
        await do("DeleteObjects", Bucket=bucket, Delete={"Objects": doomed, "Quiet": True})
        await do("ListObjectsV2", Bucket=bucket)
        outcomes[name] = do.outcomes

    assert outcomes["lean"] == outcomes["boto"]


async def upload_in_parts(do: CallRecorder, bucket: str) -> None:
    at = {"Bucket": bucket, "Key": "large"}
    upload = (await do("CreateMultipartUpload", **at))["UploadId"]
    parts = []
    for number, body in enumerate((b"x" * 5 * 1024 * 1024, b"end"), start=1):
        part = await do("UploadPart", **at, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    await do("CompleteMultipartUpload", **at, UploadId=upload, MultipartUpload={"Parts": parts})
    await do("GetObject", **at, Range="bytes=5242878-")
    stale = (await do("CreateMultipartUpload", **at))["UploadId"]
    await do("AbortMultipartUpload", **at, UploadId=stale)


@over("s3")
@pytest.mark.parametrize("name", sorted(TRANSPORTS))
async def test_a_body_can_be_streamed_in_both_directions(
    clients: dict[str, RetryingAwsClient], name: str
) -> None:
    client, data = clients[name], bytes(range(256)) * 10_000
    at = {"Bucket": await a_bucket(clients["boto"]), "Key": "large"}
    body = {"Body": pieces_of(data), "ContentLength": len(data)}

    await client.call("s3", "PutObject", {**at, **body})
    async with client.open("s3", "GetObject", at) as answer:
        received = b"".join([piece async for piece in answer["Body"]])

    assert received == data
    assert answer["ContentLength"] == len(data)


@over("s3")
@pytest.mark.parametrize("name", sorted(TRANSPORTS))
async def test_opening_a_missing_object_raises_blob_missing(
    clients: dict[str, RetryingAwsClient], name: str
) -> None:
    bucket = await a_bucket(clients["boto"])

    with pytest.raises(BlobMissing):
        async with clients[name].open("s3", "GetObject", {"Bucket": bucket, "Key": "no"}):
            pass


@over("s3")
async def test_a_wrong_key_is_rejected_by_a_server_that_verifies_signatures(
    clients: dict[str, RetryingAwsClient], access: StaticAccess
) -> None:
    at = {"Bucket": await a_bucket(clients["boto"]), "Key": "a b/ü"}
    await clients["lean"].call("s3", "PutObject", {**at, "Body": b"hello"})
    stranger = StaticAccess(access.region, Credentials(ACCESS_KEY, "wrong"), access.endpoints)

    async with an_http_transport(stranger) as transport:
        with pytest.raises(NotAllowed, match="SignatureDoesNotMatch"):
            await an_aws_client(transport).call("s3", "GetObject", at)


@over("s3")
async def test_a_presigned_url_needs_no_credentials(
    clients: dict[str, RetryingAwsClient], access: StaticAccess
) -> None:
    at = {"Bucket": await a_bucket(clients["boto"]), "Key": "a b/ü+%"}
    await clients["lean"].call("s3", "PutObject", {**at, "Body": b"hello"})

    async with an_http_transport(access) as transport:
        url = await transport.presign("GetObject", at, expires_s=60)
    forged = url[:-1] + ("0" if url[-1] != "0" else "1")

    assert httpx.get(url).content == b"hello"
    assert httpx.get(forged).status_code == 403
