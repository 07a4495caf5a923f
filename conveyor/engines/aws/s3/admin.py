"""The bucket, made so that making it again is fine (docs/storage.md, S3 objects).

Its lifecycle is the backstop behind what we remove ourselves: uploads that broke off, lists in
slots that the sweeper has missed, what a bucket with versions keeps of the removed, and bodies that
are as old as any may become. A rule knows things by their prefix alone: what lies under `jobs/`
goes by its age, and lists, which stay as long as their job, lie elsewhere.
"""

from __future__ import annotations

from typing import Any

from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.errors import AwsError

ABANDONED_DAYS = 1
INPUT_DAYS = 30
OLD_VERSION_DAYS = 1

_OURS = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})
_NOT_OFFERED = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported"})
_NONE_YET = "NoSuchLifecycleConfiguration"
_HOME = "us-east-1"
_JOBS = "jobs/"
_OLD_BODIES = "old-bodies"

Rule = dict[str, Any]

PRIVATE = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}


def lifecycle(body_days: int) -> list[Rule]:
    return [
        _rule(
            "abandoned-uploads",
            "",
            AbortIncompleteMultipartUpload={"DaysAfterInitiation": ABANDONED_DAYS},
        ),
        _rule("forgotten-inputs", "inputs/", Expiration={"Days": INPUT_DAYS}),
        _rule(_OLD_BODIES, _JOBS, Expiration={"Days": body_days}),
        _rule("old-versions", "", NoncurrentVersionExpiration={"NoncurrentDays": OLD_VERSION_DAYS}),
    ]


def _rule(name: str, prefix: str, **action: dict[str, int]) -> Rule:
    return {"ID": name, "Status": "Enabled", "Filter": {"Prefix": prefix}, **action}


async def make_bucket(client: AwsClient, bucket: str, *, region: str, body_days: int) -> list[str]:
    """The bucket, closed to the public, with its lifecycle. `seam` has the control plane behind it.

    Answers what it has to do without, and why. NotAllowed when a bucket of that name is somebody
    else's.
    """
    params: dict[str, Any] = {"Bucket": bucket}
    if region != _HOME:
        params["CreateBucketConfiguration"] = {"LocationConstraint": region}
    try:
        await client.call("s3", "CreateBucket", params)
    except AwsError as error:
        if error.code not in _OURS:
            raise
        await client.call("s3", "HeadBucket", {"Bucket": bucket})
    there, left_out = await _rules_of(client, bucket), []
    ours = {rule["ID"]: rule for rule in lifecycle(body_days)}
    others = [rule for rule in there if rule.get("ID") not in ours]
    is_swept = any(rule.get("ID") == _OLD_BODIES for rule in there)
    if not is_swept and await _has_old_lists(client, bucket):
        del ours[_OLD_BODIES]
        left_out = [f"bodies do not go by age: lists of an earlier release are under {_JOBS}"]
    rules = [*others, *ours.values()]
    configured: dict[str, dict[str, Any]] = {
        "PutPublicAccessBlock": {"PublicAccessBlockConfiguration": PRIVATE},
        "PutBucketLifecycleConfiguration": {"LifecycleConfiguration": {"Rules": rules}},
    }
    return left_out + [
        f"not offered here: {operation}"
        for operation, params in configured.items()
        if not await _is_offered(client, operation, {"Bucket": bucket, **params})
    ]


async def _rules_of(client: AwsClient, bucket: str) -> list[Rule]:
    try:
        there = await client.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})
    except AwsError as error:
        if error.code != _NONE_YET and not _is_not_offered(error):
            raise
        return []
    return list(there.get("Rules", ()))


async def _has_old_lists(client: AwsClient, bucket: str) -> bool:
    """Whether lists lie where bodies do, as they did in earlier releases: they must not go by age.

    One question a job: in the order of keys its lists come last.
    """
    asked, after = {"Bucket": bucket, "Prefix": _JOBS, "MaxKeys": 1}, _JOBS
    while True:
        page = await client.call("s3", "ListObjectsV2", {**asked, "StartAfter": after})
        if not page.get("Contents"):
            return False
        key = page["Contents"][0]["Key"]
        job, _, rest = key.removeprefix(_JOBS).partition("/")
        if rest.startswith("sources/"):
            return True
        after = max(key, f"{_JOBS}{job}/sources/")


def _is_not_offered(error: AwsError) -> bool:
    return error.code in _NOT_OFFERED or error.status == 501


async def _is_offered(client: AwsClient, operation: str, params: dict[str, Any]) -> bool:
    try:
        await client.call("s3", operation, params)
    except AwsError as error:
        if not _is_not_offered(error):
            raise
        return False
    return True
