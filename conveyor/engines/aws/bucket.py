"""The bucket: private, and cleared of what nobody will finish (SPEC 5.6)."""

from __future__ import annotations

from typing import Any

from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.seam import Seam

_OURS = "BucketAlreadyOwnedByYou"
_NOT_OFFERED = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported"})
# Where no constraint may be named.
_FIRST_REGION = "us-east-1"


async def create_bucket(seam: Seam, name: str, *, region: str) -> list[str]:
    """Makes the bucket and its rules; answers the rules that this service does not offer."""
    params: dict[str, Any] = {"Bucket": name}
    if region != _FIRST_REGION:
        params["CreateBucketConfiguration"] = {"LocationConstraint": region}
    try:
        await seam.call("s3", "CreateBucket", params)
    except AwsError as error:
        if error.code != _OURS:
            raise
    return [
        operation
        for operation, rule in _RULES.items()
        if not await _apply(seam, operation, {"Bucket": name, **rule})
    ]


async def _apply(seam: Seam, operation: str, params: dict[str, Any]) -> bool:
    try:
        await seam.call("s3", operation, params)
    except AwsError as error:
        if error.code not in _NOT_OFFERED and error.status != 501:
            raise
        return False
    return True


_RULES: dict[str, dict[str, Any]] = {
    "PutPublicAccessBlock": {
        "PublicAccessBlockConfiguration": {
            "BlockPublicAcls": True,
            "IgnorePublicAcls": True,
            "BlockPublicPolicy": True,
            "RestrictPublicBuckets": True,
        }
    },
    "PutBucketLifecycleConfiguration": {
        "LifecycleConfiguration": {
            "Rules": [
                {
                    "ID": "conveyor-unfinished-uploads",
                    "Status": "Enabled",
                    "Filter": {"Prefix": ""},
                    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
                },
                {
                    "ID": "conveyor-uploaded-lists",
                    "Status": "Enabled",
                    "Filter": {"Prefix": "inputs/"},
                    "Expiration": {"Days": 3},
                },
            ]
        }
    },
}
