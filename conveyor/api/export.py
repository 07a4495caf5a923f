"""Exports over HTTP: start one, read its progress, download the file (docs/api.md, Exports)."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from functools import partial
from urllib.parse import quote

from conveyor.api.results import REDIRECT, direct_reply, log_damage_while_sending, logging_damage
from conveyor.api.route import Access, Command, Example, Parameter, Query, Route
from conveyor.api.server.problem import BadRange
from conveyor.api.server.request import Download, RequestContext, Response, Work, json_reply
from conveyor.domain.changes import ExportKey, RunKey
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.export.formats import ENCODERS
from conveyor.domain.export_record import Destination, Export, ExportFormat, ExportOrder
from conveyor.domain.ids import ExportId, JobId, RunId
from conveyor.domain.submit.target import LOCATION_CHARS_MAX
from conveyor.schemas.requests import (
    BucketInput,
    DestinationInput,
    StartExportRequest,
    decode_start_export,
)
from conveyor.schemas.responses import ExportResponse, StartExportResponse
from conveyor.schemas.views import export_file_name, export_view, instant
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.export import ExportOptions
from conveyor.usecases.run.results import part_of_body, whole_body

# An export can be many gigabytes, so a download may take hours. It still ends, so that a client
# that reads slowly does not hold a connection for ever.
DOWNLOAD_S = 6 * 3600
# One range with a first byte. RFC 9110 allows a server to ignore other forms of Range.
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?\Z")


def start(call: RequestContext) -> Work:
    kind, order = _format_from(call.parameter("format")), _order_from(call.parameter("order"))
    request = decode_start_export(call.body) if call.body else StartExportRequest()
    destination = None
    if request.destination is not None:
        destination = _destination_from(call.env, request.destination)
    return partial(_start, call, kind, ExportOptions(order, destination))


def _destination_from(env: Context, request: DestinationInput) -> Destination:
    """Checks the destination against the target policy of webhooks, and returns it."""
    if (request.url is None) == (request.s3 is None):
        raise InvalidArgument("Give either url or s3.", pointer="/destination")
    bucket = request.s3
    url = request.url if bucket is None else _object_url(bucket)
    assert url is not None
    why = env.config.webhooks.forbids_receiver(url, chars_max=LOCATION_CHARS_MAX)
    if why is not None:
        raise InvalidArgument(
            f"The destination must be a public https URL: {why}.", pointer="/destination"
        )
    if bucket is None:
        return Destination(url)
    return Destination(
        url,
        region=bucket.region,
        access_key=bucket.access_key_id,
        secret_key=bucket.secret_access_key,
        session_token=bucket.session_token,
    )


def _object_url(bucket: BucketInput) -> str:
    key = quote(bucket.key, safe="/~")
    if bucket.endpoint is not None:
        return f"{bucket.endpoint.rstrip('/')}/{bucket.bucket}/{key}"
    host = f"s3.{bucket.region}.amazonaws.com"
    # A dot in the name of a bucket would not match the certificate of the service.
    if "." in bucket.bucket:
        return f"https://{host}/{bucket.bucket}/{key}"
    return f"https://{bucket.bucket}.{host}/{key}"


def _format_from(text: str | None) -> ExportFormat:
    if text is None:
        return ExportFormat.ZIP
    if text not in set(ExportFormat):
        raise InvalidArgument(
            f"format must be one of {', '.join(ExportFormat)}.", pointer="/format"
        )
    return ExportFormat(text)


def _order_from(text: str | None) -> ExportOrder:
    if text is None:
        return ExportOrder.ID
    if text not in set(ExportOrder):
        raise InvalidArgument(f"order must be one of {', '.join(ExportOrder)}.", pointer="/order")
    return ExportOrder(text)


async def _start(
    call: RequestContext,
    kind: ExportFormat,
    options: ExportOptions,
    export_id: str,
) -> Response:
    ids = call.ids
    key = ExportKey(JobId(ids["job_id"]), RunId(ids["run_id"]), ExportId(export_id))
    find_begun = partial(call.env.store.read, key)
    async with call.api.storage.admit_export(call.caller, key.run_id, find_begun):
        export = await exports.start(
            call.env,
            call.caller,
            ids["job_id"],
            ids["run_id"],
            kind,
            options,
            export_id=export_id,
        )
    body = StartExportResponse(
        export_id=export.export_id,
        status=export.status,
        format=export.format,
        order=export.order,
        destination=export.destination,
        created_at=instant(export.created_at),
        expires_at=instant(export.expires_at),
    )
    return json_reply(body, 202)


async def get(call: RequestContext) -> Response:
    export = await _own(call)
    return json_reply(export_view(export, _link_to(call, export)))


async def get_content(call: RequestContext) -> Response | Download:
    token = call.parameter("token")
    export = await (_own(call) if token is None else _by_link(call, token))
    if export.key is None:
        raise Conflict(
            "The export is not complete. Poll it until its status is completed.",
            code="export_not_ready",
        )
    media_type, name = ENCODERS[export.format].media_type, export_file_name(export)
    direct = await direct_reply(
        call, export.key, content_type=media_type, name=name, until=export.expires_at
    )
    if direct is not None:
        return direct
    start, end = _part(call.headers.get("range"), export.size_bytes)
    headers = {
        "Content-Type": media_type,
        "Content-Length": str(end - start),
        "Content-Disposition": f'attachment; filename="{name}"',
        "Accept-Ranges": "bytes",
        "ETag": f'"{export.sha256}"',
    }
    fields = {"export": export.export_id, "run": export.run_id, "blob": export.key}
    with logging_damage(fields):
        pieces = log_damage_while_sending(await _body_of(call, export, start, end), fields)
    if end - start == export.size_bytes:
        return Download(pieces, headers, timeout_s=DOWNLOAD_S)
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{export.size_bytes}"
    return Download(pieces, headers, 206, timeout_s=DOWNLOAD_S)


async def _own(call: RequestContext) -> Export:
    ids = call.ids
    return await exports.own_export(
        call.env, call.caller, ids["job_id"], ids["run_id"], ids["export_id"]
    )


async def _by_link(call: RequestContext, token: str) -> Export:
    run_key = RunKey(JobId(call.ids["job_id"]), RunId(call.ids["run_id"]))
    return await exports.export_by_link(
        call.env, run_key, call.ids["export_id"], token, lets_in=call.api.auth.lets_in
    )


def _link_to(call: RequestContext, export: Export) -> str:
    path = f"/v1/jobs/{export.job_id}/runs/{export.run_id}/exports/{export.export_id}/content"
    return f"{call.base_url}{path}?token={exports.link_token(call.env, export)}"


def _part(range_header: str | None, size_bytes: int) -> tuple[int, int]:
    """Returns the requested part as [start, end). Unsupported ranges return the whole file."""
    match = _RANGE.match(range_header or "")
    if match is None:
        return 0, size_bytes
    start = int(match[1])
    end = size_bytes if match[2] is None else min(int(match[2]) + 1, size_bytes)
    if start >= size_bytes:
        raise BadRange(f"The file has {size_bytes} bytes.")
    return (start, end) if start < end else (0, size_bytes)


async def _body_of(
    call: RequestContext, export: Export, start: int, end: int
) -> AsyncGenerator[bytes, None]:
    """Opens the file. A whole file is checked against its digest, a part against its length."""
    assert export.key is not None
    absent = "The file is no longer stored."
    if end - start < export.size_bytes or export.sha256 is None:
        return await part_of_body(call.env, export.key, start=start, end=end, absent=absent)
    return await whole_body(
        call.env,
        export.key,
        size_bytes=export.size_bytes,
        sha256=export.sha256,
        absent=absent,
    )


FORMAT = Parameter(
    "format",
    {"type": "string", "enum": list(ExportFormat), "default": ExportFormat.ZIP},
    "The format of the file.",
)
ORDER = Parameter(
    "order",
    {"type": "string", "enum": list(ExportOrder), "default": ExportOrder.ID},
    "The order of the tasks in the file: by id, or as the lines were submitted.",
)
TOKEN = Parameter("token", {"type": "string"}, "From a `download_url`; replaces the API key.")

_EXPORTS = "/v1/jobs/{job_id}/runs/{run_id}/exports"

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path=_EXPORTS,
        name="startResultsExport",
        tag="runs",
        summary="Start an export of the results of an ended run as one file",
        description=(
            "Requests the results of an ended run as one file. A worker writes it, and puts it to "
            "the destination if there is one; poll the export until it is completed."
        ),
        example=Example(query={"format": "jsonl"}, body={}),
        does=Command(start, StartExportRequest, is_body_optional=True),
        answers={202: StartExportResponse},
        problems=(410,),
        query=(FORMAT, ORDER),
    ),
    Route(
        method="GET",
        path=_EXPORTS + "/{export_id}",
        name="getResultsExport",
        tag="runs",
        summary="Show the progress of an export, with a link to its complete file",
        description=(
            "Shows how far an export is. A completed one has a link to its file, which works "
            "without a key for an hour, and the manifest to verify the file by."
        ),
        does=Query(get),
        answers={200: ExportResponse},
    ),
    Route(
        method="GET",
        path=_EXPORTS + "/{export_id}/content",
        name="getResultsExportContent",
        tag="runs",
        summary="Download the file of an export, or a range of it",
        description=(
            "Returns the file of a completed export, or the part that the Range header names."
        ),
        does=Query(get_content),
        answers={200: "*/*", 206: "*/*", 302: None},
        problems=(409, 416),
        query=(TOKEN, REDIRECT),
        access=Access.LINK,
    ),
)
