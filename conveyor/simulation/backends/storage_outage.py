"""Outages of body storage: for minutes it is full, missing, or refuses access (docs/simulator.md).

Full storage can still be read, and objects can be removed. Rows and queues are not affected.
"""

from __future__ import annotations

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.simulation.faults.faults import Fault

PIECE = "a piece of "
"""In the trace, this precedes the operation for each further piece of a body that is being read."""

OUTAGES = (Fault.STORAGE_FULL, Fault.STORAGE_MISSING, Fault.STORAGE_DENIED)

_WRITES = frozenset({"put", "put_stream", "add", "copy"})
_S3_WRITES = frozenset(
    {"PutObject", "CopyObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
)
_S3_ERRORS = {
    Fault.STORAGE_FULL: ("InsufficientStorage", 507),
    Fault.STORAGE_MISSING: ("NoSuchBucket", 404),
    Fault.STORAGE_DENIED: ("AccessDenied", 403),
}


def storage_error(fault: Fault | None, service: str, method: str) -> Exception | None:
    """The error of a storage call during this outage; None if the call works."""
    if fault is None or service not in {"blobs", "s3"}:
        return None
    if fault is Fault.STORAGE_FULL and method not in _WRITES | _S3_WRITES:
        return None
    if service == "s3" and method.startswith(PIECE):
        # The response has begun, so S3 can only break the connection.
        return NoResponse("the connection broke", was_sent=True)
    if service == "s3":
        code, status = _S3_ERRORS[fault]
        return AwsError(code, "the storage is away", status=status)
    if fault is Fault.STORAGE_FULL:
        return StorageFull("no room for a body")
    return Unavailable(f"file system: {fault.value}")
