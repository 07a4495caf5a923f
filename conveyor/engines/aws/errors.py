"""Errors of AWS services, and their translation to the errors of the ports
(docs/engines.md, AWS client).

A call has three outcomes. Applied: it returned an answer. Refused: it raised AwsError and did
nothing. Unknown: it raised Unavailable, and only a read can find out whether it was applied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from conveyor.domain.errors import ConveyorError
from conveyor.ports.errors import BlobMissing, QueueGone, StorageFull, Unavailable


class AwsError(ConveyorError):
    """A service refused a call. `reasons` are those of a cancelled transaction, one per item."""

    def __init__(
        self, code: str, message: str, *, status: int = 400, reasons: Sequence[str] = ()
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.status = status
        self.reasons = tuple(reasons)


class NotApplied(Unavailable):
    """Every attempt was refused for now or was not sent. The call did nothing."""


class NotAllowed(NotApplied):
    """Refused until an operator repairs keys, permissions or the bucket. The call did nothing."""

    needs_operator = True

    def __init__(self, detail: str, *, code: str, status: int) -> None:
        super().__init__(detail)
        self.code = code
        self.status = status


class NoResponse(ConveyorError):
    """No answer arrived. With `was_sent` the service may have applied the call."""

    def __init__(self, detail: str, *, was_sent: bool) -> None:
        super().__init__(detail)
        self.was_sent = was_sent


THROTTLES = frozenset(
    {
        "BandwidthLimitExceeded",
        "OverLimit",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
# Not applied, and worth a retry. ConditionalRequestConflict is a lost race between two writers. For
# RequestTimeTooSkewed the transport has corrected its clock before the retry.
_TRANSIENT = frozenset(
    {
        "ConditionalRequestConflict",
        "OperationAborted",
        "RequestTimeTooSkewed",
        "ServiceUnavailable",
        "TransactionConflictException",
        "TransactionInProgressException",
    }
)
# Not applied, and a retry does not help until an operator repairs keys, permissions, or a resource
# that `conveyor init` creates.
_FOR_OPERATORS = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AllAccessDisabled",
        "ExpiredToken",
        "ExpiredTokenException",
        "Forbidden",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "KMSAccessDeniedException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NoSuchBucket",
        "NotAuthorized",
        "OptInRequired",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    }
)
_TRANSIENT_REASONS = frozenset(
    {"ProvisionedThroughputExceeded", "ThrottlingError", "TransactionConflict"}
)
_NO_REASON = "None"
_QUEUE_GONE = frozenset({"QueueDoesNotExist", "QueueDeletedRecently"})
_BLOB_MISSING = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound"})


def is_refused_for_now(error: AwsError) -> bool:
    """Returns whether nothing was applied and the same call may succeed in a moment.

    A cancelled transaction counts only if all its reasons are temporary: a failed condition beside
    a conflict would fail again.
    """
    if error.code == "TransactionCanceledException":
        real = {reason for reason in error.reasons if reason != _NO_REASON}
        return bool(real) and real <= _TRANSIENT_REASONS
    return error.code in THROTTLES or error.code in _TRANSIENT or error.status == 503


def is_unknown(error: AwsError) -> bool:
    """Returns whether the service failed on the way, so that the call may have been applied."""
    return error.status >= 500 and error.status not in {501, 503, 507}


def needs_operator(error: AwsError | NoResponse) -> bool:
    """Returns whether calls like this one are refused until an operator acts."""
    return isinstance(error, AwsError) and error.code in _FOR_OPERATORS


def describe(error: AwsError, call: str) -> str:
    """Returns the cause of a refusal, with the permission that the call lacks."""
    if not is_denial(error.code):
        return f"{call}: {error}"
    return f"{call}: {error} (missing permission: {permission_for(call, str(error))})"


def is_billed(error: AwsError | NoResponse) -> bool:
    if isinstance(error, NoResponse):
        return error.was_sent
    return not is_refused_for_now(error)


def is_lost(error: AwsError | NoResponse) -> bool:
    """Returns whether it is unknown if the call was applied."""
    return error.was_sent if isinstance(error, NoResponse) else is_unknown(error)


def raise_translated(error: AwsError | NoResponse, call: str, *, was_lost: bool = True) -> NoReturn:
    """Raises the error of the ports. A refusal that only the caller can judge stays an AwsError.

    `was_lost` states whether any attempt of the call may have been applied.
    """
    unanswered = Unavailable if was_lost else NotApplied
    if isinstance(error, NoResponse):
        raise unanswered(f"{call}: {error}") from error
    if error.code in _QUEUE_GONE:
        raise QueueGone(call) from error
    if error.code in _BLOB_MISSING:
        raise BlobMissing(call) from error
    if error.status == 507:
        raise StorageFull(f"{call}: {error.code}") from error
    if is_refused_for_now(error) or is_unknown(error):
        raise unanswered(f"{call}: {error.code}") from error
    if needs_operator(error):
        detail = describe(error, call)
        # NotAllowed promises that the call did nothing. After a lost attempt that is not known.
        if was_lost:
            raise Unavailable(detail) from error
        raise NotAllowed(detail, code=error.code, status=error.status) from error
    raise error


# Permissions: names the IAM permission that a refused call lacks (docs/deploy.md, Permissions).
# Services word their refusals differently: DynamoDB and SQS name the action, S3 often says only
# "Access Denied". The name of an API call is not always the name of its action.

# S3 hides from a caller without s3:ListBucket that an object does not exist.
_READ = "s3:GetObject, or s3:ListBucket if the object does not exist"
# API calls whose action has another name. SQS has no actions of their own for batches.
_ACTIONS = {
    "dynamodb.BatchExecuteStatement": "dynamodb:PartiQLInsert",
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
    action = named.group(1)
    # Some services name it in lower case, and some name the call instead.
    names = {own.lower(), call.replace(".", ":", 1).lower()}
    return own if action.lower() in names else action
