"""HttpExportSink: puts the file of an export to a presigned URL or into a bucket (SPEC.md 4.19).

A bucket's object is put by a URL that is signed for this request, with the keys of the bucket's
owner. So both kinds of destination are one PUT, with the guards of a webhook: one name resolution,
checked addresses, no redirect.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from conveyor import USER_AGENT
from conveyor.domain.export_record import Destination
from conveyor.domain.submit.target import LOCATION_CHARS_MAX, BadUrl, Target, parse_url
from conveyor.engines.aws_signature import Credentials, Scope, presign_query
from conveyor.http_client.errors import FetchFailed, OutOfResources, TimedOut
from conveyor.http_client.exchange import Request, Upload
from conveyor.http_client.pool import HttpPool
from conveyor.ports.errors import Unavailable
from conveyor.ports.export_sink import OutgoingFile
from conveyor.ports.webhook_sender import Delivered, NotDelivered

# Half an hour for 5 GB, the largest object of one PUT, is 3 MB/s.
_DEADLINE_S = 1800.0
# S3 answers when it has stored the object, which takes a while for a large one.
_RESPONSE_S = 60.0


class HttpExportSink:
    def __init__(self, pool: HttpPool, *, now: Callable[[], float]) -> None:
        self._pool = pool
        self._now = now

    async def put(self, file: OutgoingFile) -> Delivered | NotDelivered:
        target = parse_url(file.destination.url, chars_max=LOCATION_CHARS_MAX)
        if isinstance(target, BadUrl):
            return NotDelivered(f"transport_error:{target.reason.value}")
        # Plain http is accepted only where private targets are, as in development.
        if not (target.is_tls or self._pool.policy.allow_private):
            return NotDelivered("transport_error:https is required")
        request = Request(
            method="PUT",
            target=self._sign(file.destination, target),
            partition=file.partition,
            headers=(("User-Agent", USER_AGENT), ("Content-Type", file.content_type)),
            deadline_s=_DEADLINE_S,
            read_timeout_s=_RESPONSE_S,
        )
        try:
            async with self._pool.open(request, Upload(file.pieces, file.size_bytes)) as response:
                status = response.status
        except OutOfResources as error:
            raise Unavailable(error.detail) from error
        except TimedOut:
            return NotDelivered("timeout")
        except FetchFailed as error:
            return NotDelivered(f"transport_error:{error.detail}")
        if 200 <= status < 300:
            return Delivered(status)
        return NotDelivered(f"http_{status // 100}xx:{status}", status)

    def _sign(self, destination: Destination, target: Target) -> Target:
        if destination.access_key is None or destination.secret_key is None:
            return target
        keys = Credentials(
            destination.access_key, destination.secret_key, destination.session_token
        )
        query = presign_query(
            "PUT",
            target.path_and_query,
            [],
            [("host", target.authority)],
            scope=Scope("s3", destination.region or "us-east-1", keys),
            now=self._now(),
            expires_s=int(_DEADLINE_S),
        )
        return msgspec.structs.replace(target, path_and_query=f"{target.path_and_query}?{query}")
