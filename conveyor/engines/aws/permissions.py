"""Names the IAM permission that a refused call lacks (docs/deploy.md, Permissions).

Services word their refusals differently: DynamoDB and SQS name the action, S3 often says only
"Access Denied". The name of an API call is not always the name of its action.
"""

from __future__ import annotations

import re

# S3 hides from a caller without s3:ListBucket that an object does not exist.
_READ = "s3:GetObject, or s3:ListBucket if the object does not exist"
# API calls whose action has another name. SQS has no actions of their own for batches.
_ACTIONS = {
    "dynamodb.TransactWriteItems": (
        "dynamodb:PutItem, UpdateItem, DeleteItem or ConditionCheckItem"
    ),
    "dynamodb.TransactGetItems": "dynamodb:GetItem",
    "s3.CompleteMultipartUpload": "s3:PutObject",
    "s3.CopyObject": "s3:PutObject, or s3:GetObject on the source",
    "s3.CreateMultipartUpload": "s3:PutObject",
    "s3.DeleteObjects": "s3:DeleteObject",
    "s3.GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "s3.GetObject": _READ,
    "s3.HeadBucket": "s3:ListBucket",
    "s3.HeadObject": _READ,
    "s3.ListObjectsV2": "s3:ListBucket",
    "s3.PutBucketLifecycleConfiguration": "s3:PutLifecycleConfiguration",
    "s3.PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "s3.UploadPart": "s3:PutObject",
    "sqs.ChangeMessageVisibilityBatch": "sqs:ChangeMessageVisibility",
    "sqs.DeleteMessageBatch": "sqs:DeleteMessage",
    "sqs.SendMessageBatch": "sqs:SendMessage",
    "stepfunctions.SendTaskFailure": "states:SendTaskFailure",
    "stepfunctions.SendTaskSuccess": "states:SendTaskSuccess",
}
_NAMED = re.compile(r"\b(?:perform:? |action:? )[`'\"]?([a-z0-9-]+:[A-Za-z]+)")
_DENIALS = frozenset({"AccessDenied", "AccessDeniedException", "Forbidden", "NotAuthorized"})


def is_denial(code: str) -> bool:
    """Returns whether the code says that a permission is missing, and not that keys are bad."""
    return code in _DENIALS


def permission_for(call: str, message: str = "") -> str:
    """Returns the action that a refused call such as `sqs.SendMessageBatch` needs.

    `message` is the service's own text. Some services name the action in it.
    """
    own = _ACTIONS.get(call, call.replace(".", ":", 1))
    named = _NAMED.search(message)
    if named is None:
        return own
    action = named.group(1).removesuffix("Batch")
    # Some services name it in lower case.
    return own if action.lower() == own.lower() else action
