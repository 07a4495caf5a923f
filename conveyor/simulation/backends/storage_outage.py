"""Outages of the storage of bodies: full, missing, or closed to us, for minutes
(docs/simulator.md).

While it is full, what is stored can still be read and removed. Rows and queues are not affected.
"""

from __future__ import annotations

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.simulation.faults.faults import Fault

PIECE = "a piece of "
"""How the read of a body that has begun is called in a trace, before its operation."""

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
    """What a call of the storage fails with during this outage; None if it does not."""
    if fault is None or service not in {"blobs", "s3"}:
        return None
    if fault is Fault.STORAGE_FULL and method not in _WRITES | _S3_WRITES:
        return None
    if service == "s3" and method.startswith(PIECE):
        # The response has begun: S3 can only break the connection from here on.
        return NoResponse("the connection broke", was_sent=True)
    if service == "s3":
        code, status = _S3_ERRORS[fault]
        return AwsError(code, "the storage is away", status=status)
    if fault is Fault.STORAGE_FULL:
        return StorageFull("no room for a body")
    return Unavailable(f"file system: {fault.value}")
