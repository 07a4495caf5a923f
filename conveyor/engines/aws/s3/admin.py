"""Creation of the bucket, which may be repeated (docs/storage.md, S3 objects).

The bucket's lifecycle removes what the service itself failed to remove: interrupted uploads,
uploaded lists that the sweeper missed, old versions in a versioned bucket, and bodies that have
reached the maximum age. A lifecycle rule selects objects by prefix only. So everything under
`jobs/` expires by age, and lists, which live as long as their job, are under another prefix.
"""

from __future__ import annotations

from typing import Any

from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.errors import AwsError

# In days after the start of the upload, the creation of the list, and the removal of the object.
ABANDONED_DAYS = 1
INPUT_DAYS = 30
OLD_VERSION_DAYS = 1

_OURS = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})
_NOT_OFFERED = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported"})
_NONE_YET = "NoSuchLifecycleConfiguration"
_HOME = "us-east-1"  # S3 refuses a LocationConstraint for this region.
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
    """Creates the bucket, closes it to the public, and sets its lifecycle.

    `client` needs BotoTransport, because HttpTransport lacks these operations. Returns the settings
    that were left out, with the reason. Raises NotAllowed if the bucket belongs to another account.
    """
    params: dict[str, Any] = {"Bucket": bucket}
    if region != _HOME:
        params["CreateBucketConfiguration"] = {"LocationConstraint": region}
    try:
        await client.call("s3", "CreateBucket", params)
    except AwsError as error:
        if error.code not in _OURS:
            raise
        # The bucket exists. HeadBucket fails if it belongs to another account.
        await client.call("s3", "HeadBucket", {"Bucket": bucket})
    # Rules that are not ours are kept: setting a lifecycle replaces all rules.
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
    """Returns whether lists are under the prefix of bodies, as in earlier releases.

    Such lists must not expire by age. The search makes one call per job and skips its bodies: in
    the order of keys the lists of a job come last.
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
