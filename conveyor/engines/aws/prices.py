"""List prices of us-east-1, on demand, as published in 2025: data, to be replaced when they change.

In millionths of a dollar for one unit. Storage, transfer and the free tier are left out.
"""

from __future__ import annotations

READ_UNIT = 0.125
WRITE_UNIT = 0.625
SQS_REQUEST = 0.4
S3_WRITE_REQUEST = 5.0
S3_READ_REQUEST = 0.4

# Whatever S3 bills as PUT, COPY, POST or LIST; deletes are free, and the rest are reads.
S3_WRITES = frozenset(
    {
        "CompleteMultipartUpload",
        "CopyObject",
        "CreateMultipartUpload",
        "ListObjectsV2",
        "PutObject",
        "UploadPart",
    }
)
S3_FREE = frozenset({"AbortMultipartUpload", "DeleteObject", "DeleteObjects"})
