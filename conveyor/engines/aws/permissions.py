"""Names the IAM permission that a refused call lacks (docs/deploy.md, Permissions).

Services word their refusals differently: DynamoDB and SQS name the action, S3 often says only
"Access Denied". The name of an API call is not always the name of its action.
"""

from __future__ import annotations

import re

# API calls whose action has another name. SQS has no actions of their own for batches.
_ACTIONS = {
    "dynamodb.TransactWriteItems": (
        "dynamodb:PutItem, UpdateItem, DeleteItem or ConditionCheckItem"
    ),
    "dynamodb.TransactGetItems": "dynamodb:GetItem",
    "s3.CompleteMultipartUpload": "s3:PutObject",
    "s3.CreateMultipartUpload": "s3:PutObject",
    "s3.DeleteObjects": "s3:DeleteObject",
    "s3.GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "s3.HeadBucket": "s3:ListBucket",
    "s3.HeadObject": "s3:GetObject",
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
    named = _NAMED.search(message)
    if named is not None and call not in _ACTIONS:
        return named.group(1)
    if named is not None and call.startswith("dynamodb.Transact"):
        return named.group(1)
    return _ACTIONS.get(call, call.replace(".", ":", 1))
