"""Uploaded lists over HTTP: create a slot, upload a list to it (docs/api.md, Uploaded lists)."""

from __future__ import annotations

from collections.abc import AsyncIterable
from functools import partial

from conveyor.api.route import Access, Command, Example, Parameter, Route, Upload
from conveyor.api.server.request import RequestContext, Response, Work, json_reply
from conveyor.domain import limits
from conveyor.domain.changes import InputKey
from conveyor.domain.ids import InputId
from conveyor.domain.model import JobInput, ListFormat, ListSpec
from conveyor.schemas.requests import CreateJobInputRequest, decode_create_input, list_spec_of
from conveyor.schemas.responses import CreateJobInputResponse, UploadResponse, UploadTarget
from conveyor.schemas.views import instant
from conveyor.usecases.submit import upload as uploads

CONTENT_TYPES = {
    ListFormat.CSV: "text/csv",
    ListFormat.NDJSON: "application/x-ndjson",
    ListFormat.TEXT: "text/plain",
}


def create_input(call: RequestContext) -> Work:
    return partial(_create_input, call, list_spec_of(decode_create_input(call.body)))


async def _create_input(call: RequestContext, spec: ListSpec, input_id: str) -> Response:
    find_begun = partial(call.env.store.read, InputKey(InputId(input_id)))
    async with call.api.storage.admit_slot(call.caller, find_begun):
        slot = await uploads.create(call.env, call.caller, spec, input_id=InputId(input_id))
    content_type = CONTENT_TYPES[spec.format]
    target = UploadTarget(
        method="PUT",
        url=await _upload_url(call, slot, content_type),
        headers={"Content-Type": content_type},
        expires_at=instant(slot.expires_at),
    )
    body = CreateJobInputResponse(
        file_input_id=slot.input_id, upload=target, expires_at=instant(slot.expires_at)
    )
    return json_reply(body, 201)


async def _upload_url(call: RequestContext, slot: JobInput, content_type: str) -> str:
    """The signed URL of the storage if it has one, else a URL of this server."""
    direct = await call.env.blobs.upload_url(
        uploads.slot_key(slot.input_id), content_type=content_type, expires_at=slot.expires_at
    )
    token = uploads.upload_token(call.env, slot)
    return direct or f"{call.base_url}/v1/job_inputs/{slot.input_id}/upload?token={token}"


async def upload(call: RequestContext, pieces: AsyncIterable[bytes]) -> Response:
    token, input_id = call.parameter("token"), call.ids["input_id"]
    if token is None:
        slot = await uploads.own_input(call.env, call.caller, input_id)
    else:
        slot = await uploads.input_by_token(
            call.env, input_id, token, lets_in=call.api.auth.lets_in
        )
    stored = await uploads.fill(call.env, slot, pieces)
    return json_reply(UploadResponse(size_bytes=stored.size_bytes, sha256=stored.sha256))


TOKEN = Parameter("token", {"type": "string"}, "Replaces the API key.")

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/job_inputs",
        name="createJobInput",
        tag="job_inputs",
        summary="Create a slot for the upload of a list",
        description=(
            "Creates a slot for a list that is too long for a request, and says where to upload "
            "it. The slot lives for a day."
        ),
        example=Example(
            body={"type": "csv", "csv": {"fields": {"url": 0, "external_id": 1}, "header": True}},
        ),
        does=Command(create_input, CreateJobInputRequest),
        answers={201: CreateJobInputResponse},
    ),
    Route(
        method="PUT",
        path="/v1/job_inputs/{input_id}/upload",
        name="uploadJobInput",
        tag="job_inputs",
        summary="Upload a list, plain or as gzip; it replaces an earlier upload",
        description=(
            "Stores a list in its slot, as a whole or not at all. Another upload replaces it. "
            "Submit the list by its `file_input_id`."
        ),
        example=Example(body="url,id\nhttps://shop.example/a,a\n"),
        does=Upload(upload, limits.UPLOAD_BYTES_MAX),
        answers={200: UploadResponse},
        problems=(411, 507),
        query=(TOKEN,),
        access=Access.LINK,
    ),
)
