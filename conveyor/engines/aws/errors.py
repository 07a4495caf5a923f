"""What a service says when it says no, and what that means to callers
(docs/engines.md, AWS client).

A call has three outcomes. Applied: there is an answer. Refused: an AwsError, nothing was done.
Unknown: Unavailable, and only a read tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from conveyor.domain.errors import ConveyorError
from conveyor.ports.errors import BlobMissing, QueueGone, StorageFull, Unavailable


class AwsError(ConveyorError):
    """A service refused. `reasons` are a cancelled transaction's, one code for each item."""

    def __init__(
        self, code: str, message: str, *, status: int = 400, reasons: Sequence[str] = ()
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.status = status
        self.reasons = tuple(reasons)


class NotApplied(Unavailable):
    """Refused for now or not even heard, every time that it was asked: this call did nothing."""


class NotAllowed(NotApplied):
    """Refused until an operator mends keys, rights or the bucket. The call did nothing."""

    needs_operator = True

    def __init__(self, detail: str, *, code: str, status: int) -> None:
        super().__init__(detail)
        self.code = code
        self.status = status


class NoResponse(ConveyorError):
    """No answer arrived. With `was_sent` the service may have done it all the same."""

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
# Not done, and worth another try: the first is a lost race, the clock is set right meanwhile.
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
# Not done either, until an operator mends it: keys, rights, or something that `init` makes.
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
    """Nothing was done, and the same call may succeed in a moment."""
    if error.code == "TransactionCanceledException":
        real = {reason for reason in error.reasons if reason != _NO_REASON}
        return bool(real) and real <= _TRANSIENT_REASONS
    return error.code in THROTTLES or error.code in _TRANSIENT or error.status == 503


def is_unknown(error: AwsError) -> bool:
    """The service failed half-way: what was asked may be done or not."""
    return error.status >= 500 and error.status not in {501, 503, 507}


def is_billed(error: AwsError | NoResponse) -> bool:
    if isinstance(error, NoResponse):
        return error.was_sent
    return not is_refused_for_now(error)


def is_lost(error: AwsError | NoResponse) -> bool:
    """What was asked may be done or not."""
    return error.was_sent if isinstance(error, NoResponse) else is_unknown(error)


def raise_translated(error: AwsError | NoResponse, call: str, *, was_lost: bool = True) -> NoReturn:
    """Raises what the ports promise. A refusal that only the caller can judge stays an AwsError.
    `was_lost` says whether any try of the call may have been done."""
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
    if error.code in _FOR_OPERATORS:
        if was_lost:
            raise Unavailable(f"{call}: {error}") from error
        raise NotAllowed(f"{call}: {error}", code=error.code, status=error.status) from error
    raise error
