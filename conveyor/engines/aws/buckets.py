"""The bucket, made so that making it again is fine (SPEC 5.5).

Its lifecycle is the backstop behind what we remove ourselves: uploads that broke off, lists in
slots that the sweeper has missed, and what a bucket with versions keeps of the removed. Bodies have
no such rule. They lie beside lists that stay as long as their job, a rule can only tell them apart
by a prefix, and results may be kept for a year.
"""

from __future__ import annotations

from typing import Any

from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.seam import Seam

ABANDONED_DAYS = 1
INPUT_DAYS = 30
OLD_VERSION_DAYS = 1

_OURS = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})
_NOT_OFFERED = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported"})
_NONE_YET = "NoSuchLifecycleConfiguration"
_HOME = "us-east-1"

LIFECYCLE: dict[str, Any] = {
    "Rules": [
        {
            "ID": "abandoned-uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABANDONED_DAYS},
        },
        {
            "ID": "forgotten-inputs",
            "Status": "Enabled",
            "Filter": {"Prefix": "inputs/"},
            "Expiration": {"Days": INPUT_DAYS},
        },
        {
            "ID": "old-versions",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "NoncurrentVersionExpiration": {"NoncurrentDays": OLD_VERSION_DAYS},
        },
    ]
}
PRIVATE = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}


async def make_bucket(seam: Seam, bucket: str, *, region: str) -> list[str]:
    """The bucket, closed to the public, with its lifecycle. `seam` has the control plane behind it.

    Answers the rules that this service does not offer. NotAllowed when a bucket of that name is
    somebody else's.
    """
    params: dict[str, Any] = {"Bucket": bucket}
    if region != _HOME:
        params["CreateBucketConfiguration"] = {"LocationConstraint": region}
    try:
        await seam.call("s3", "CreateBucket", params)
    except AwsError as error:
        if error.code not in _OURS:
            raise
        await seam.call("s3", "HeadBucket", {"Bucket": bucket})
    rules: dict[str, dict[str, Any]] = {
        "PutPublicAccessBlock": {"PublicAccessBlockConfiguration": PRIVATE},
        "PutBucketLifecycleConfiguration": {
            "LifecycleConfiguration": {"Rules": await _rules_beside_ours(seam, bucket)}
        },
    }
    return [
        operation
        for operation, rule in rules.items()
        if not await _is_offered(seam, operation, {"Bucket": bucket, **rule})
    ]


async def _rules_beside_ours(seam: Seam, bucket: str) -> list[dict[str, Any]]:
    """Ours, after those that somebody else has given the bucket."""
    ours = {rule["ID"] for rule in LIFECYCLE["Rules"]}
    try:
        there = await seam.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})
    except AwsError as error:
        if error.code != _NONE_YET and not _is_not_offered(error):
            raise
        there = {}
    others = [rule for rule in there.get("Rules", ()) if rule.get("ID") not in ours]
    return [*others, *LIFECYCLE["Rules"]]


def _is_not_offered(error: AwsError) -> bool:
    return error.code in _NOT_OFFERED or error.status == 501


async def _is_offered(seam: Seam, operation: str, params: dict[str, Any]) -> bool:
    try:
        await seam.call("s3", operation, params)
    except AwsError as error:
        if not _is_not_offered(error):
            raise
        return False
    return True
