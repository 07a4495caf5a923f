"""List prices of us-east-1, on demand, as of June 2026: data, to be replaced when they change.

In millionths of a dollar for one unit. Storage, transfer and the free tier are left out. DynamoDB
halved its prices in November 2024, and older pages still name the double; those of SQS are of its
first 100 billion requests a month.
"""

from __future__ import annotations

READ_UNIT = 0.125
WRITE_UNIT = 0.625
SQS_REQUEST = 0.4
S3_WRITE_REQUEST = 5.0
S3_READ_REQUEST = 0.4
# A node and its replica (cache.t4g.small), per hour, however many calls they answer.
REDIS_HOUR = 2 * 32_000.0

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
