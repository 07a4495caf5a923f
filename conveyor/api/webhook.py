"""Webhooks and HMAC keys over HTTP: set, test, list deliveries, rotate keys
(docs/api.md, Webhooks)."""

from __future__ import annotations

from functools import partial

from conveyor.api.route import CURSOR, LIMIT, Command, Example, Query, Route, make_handler
from conveyor.api.server.request import RequestContext, Response, Work, json_reply
from conveyor.domain import limits
from conveyor.domain.model import Webhook
from conveyor.ports.webhook_sender import NotDelivered
from conveyor.schemas.requests import (
    WebhookConfigInput,
    WebhookInput,
    decode_test_webhook,
    decode_webhook_config,
)
from conveyor.schemas.responses import (
    DeliveryResponse,
    HmacKeyCreated,
    HmacKeyFinalized,
    HmacKeyList,
    ListDeliveriesResponse,
    WebhookResponse,
    WebhookTestResponse,
)
from conveyor.schemas.views import (
    created_view,
    delivery_view,
    finalized_view,
    keys_view,
    milliseconds,
)
from conveyor.usecases import webhook as webhooks


async def get_webhook(call: RequestContext) -> Response:
    return _show(await webhooks.get(call.env, call.caller, call.ids["job_id"]))


def put_webhook(call: RequestContext) -> Work:
    config = decode_webhook_config(call.body)
    webhook = webhooks.make_webhook(call.env, config.url, signature=config.signature)
    return partial(_put_webhook, call, webhook)


async def _put_webhook(call: RequestContext, webhook: Webhook, _: str) -> Response:
    await webhooks.replace(call.env, call.api.notifier, call.caller, call.ids["job_id"], webhook)
    return _show(webhook)


async def delete_webhook(call: RequestContext, _: str) -> Response:
    await webhooks.remove(call.env, call.caller, call.ids["job_id"])
    return Response(204)


def _show(webhook: Webhook) -> Response:
    return json_reply(WebhookResponse(webhook.url, webhook.signature))


def test_webhook(call: RequestContext) -> Work:
    receiver = decode_test_webhook(call.body)
    webhook = webhooks.make_webhook(call.env, receiver.url, signature=receiver.signature)
    return partial(_test_webhook, call, webhook)


async def _test_webhook(call: RequestContext, webhook: Webhook, event_id: str) -> Response:
    call.api.requests.admit_webhook_test(call.caller)
    tested = await webhooks.send_test(
        call.env, call.api.notifier, call.caller, webhook, event_id=event_id
    )
    outcome = tested.outcome
    body = WebhookTestResponse(
        delivered=not isinstance(outcome, NotDelivered),
        event_id=tested.event_id,
        elapsed_ms=milliseconds(tested.duration_s),
        status_code=outcome.status,
        error=outcome.error if isinstance(outcome, NotDelivered) else None,
    )
    return json_reply(body)


async def list_deliveries(call: RequestContext) -> Response:
    page = await webhooks.page(
        call.env,
        call.caller,
        call.ids["job_id"],
        cursor=call.parameter("cursor"),
        limit=call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX),
    )
    deliveries = [delivery_view(notice) for notice in page.notices]
    return json_reply(ListDeliveriesResponse(deliveries, page.next_cursor))


async def redeliver(call: RequestContext, _: str) -> Response:
    notice = await webhooks.redeliver(
        call.env, call.caller, call.ids["job_id"], call.ids["event_id"]
    )
    return json_reply(delivery_view(notice), 202)


async def list_keys(call: RequestContext) -> Response:
    return json_reply(keys_view(await webhooks.keys_of(call.env, call.caller)))


async def rotate_key(call: RequestContext, kid: str) -> Response:
    created = await webhooks.rotate(call.env, call.caller, kid=kid)
    return json_reply(created_view(created.key, created.secret), 201)


async def cancel_rotation(call: RequestContext, _: str) -> Response:
    await webhooks.cancel(call.env, call.caller)
    return Response(204)


async def finalize_key(call: RequestContext, _: str) -> Response:
    return json_reply(finalized_view(await webhooks.finalize(call.env, call.caller)))


_WEBHOOK = "/v1/jobs/{job_id}/webhook"
_KEYS = "/v1/hmac/keys"

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path=_WEBHOOK,
        name="getJobWebhook",
        tag="jobs",
        summary="Show the webhook of a job",
        description="Shows the receiver of the ends of a job's runs.",
        does=Query(get_webhook),
        answers={200: WebhookResponse},
    ),
    Route(
        method="PUT",
        path=_WEBHOOK,
        name="putJobWebhook",
        tag="jobs",
        summary="Set the webhook of a job, for every delivery that is still due",
        description=(
            "Replaces the webhook of a job. Events that are not delivered yet go to the new "
            "receiver."
        ),
        example=Example(body={"url": "https://hooks.example/conveyor", "signature": False}),
        does=Command(put_webhook, WebhookConfigInput),
        answers={200: WebhookResponse},
    ),
    Route(
        method="DELETE",
        path=_WEBHOOK,
        name="deleteJobWebhook",
        tag="jobs",
        summary="Remove the webhook of a job and its undelivered events",
        description="Removes the webhook of a job. Events that are not delivered yet are dropped.",
        does=Command(make_handler(delete_webhook)),
        answers={204: None},
    ),
    Route(
        method="GET",
        path=_WEBHOOK + "/deliveries",
        name="listJobWebhookDeliveries",
        tag="jobs",
        summary="List the webhook events of a job and their delivery attempts, newest first",
        description=(
            "Lists the events of a job, newest first, with the state of their delivery and the "
            "latest attempts."
        ),
        example=Example(query={"limit": "10"}),
        does=Query(list_deliveries),
        answers={200: ListDeliveriesResponse},
        query=(LIMIT, CURSOR),
    ),
    Route(
        method="POST",
        path=_WEBHOOK + "/deliveries/{event_id}/redeliver",
        name="redeliverJobWebhookEvent",
        tag="jobs",
        summary="Deliver an event again",
        description="Makes an event due again, with its id. A worker sends it soon.",
        does=Command(make_handler(redeliver)),
        answers={202: DeliveryResponse},
    ),
    Route(
        method="POST",
        path="/v1/webhook/test",
        name="testWebhook",
        tag="webhook",
        summary="Send a test event to a receiver and show the result",
        description=(
            "Sends one test event to a receiver, signed like any other if it asks for that, and "
            "shows what the receiver answered. The attempt is not repeated."
        ),
        example=Example(body={"url": "https://hooks.example/conveyor"}),
        does=Command(test_webhook, WebhookInput),
        answers={200: WebhookTestResponse},
    ),
    Route(
        method="GET",
        path=_KEYS,
        name="listHMACKeys",
        tag="hmac",
        summary="Show your signing keys, without their secrets",
        description=(
            "Shows the ids of the caller's signing keys. No response but that of the rotation "
            "contains a secret."
        ),
        does=Query(list_keys),
        answers={200: HmacKeyList},
    ),
    Route(
        method="POST",
        path=_KEYS + "/rotate",
        name="rotateHMACKey",
        tag="hmac",
        summary="Create the first signing key, or a candidate for the next one",
        description=(
            "Creates the first signing key, which is active at once, or a candidate for the next "
            "one. Both keys sign until the rotation is finalized or cancelled. The response is the "
            "only one that contains the secret."
        ),
        does=Command(make_handler(rotate_key), is_secret=True),
        answers={201: HmacKeyCreated},
    ),
    Route(
        method="DELETE",
        path=_KEYS + "/rotate",
        name="cancelHMACRotation",
        tag="hmac",
        summary="Delete the candidate",
        description="Deletes the candidate of a rotation. The active key stays.",
        does=Command(make_handler(cancel_rotation)),
        answers={204: None},
        problems=(409,),
    ),
    Route(
        method="POST",
        path=_KEYS + "/rotate/finalize",
        name="finalizeHMACKey",
        tag="hmac",
        summary="Make the candidate the active key",
        description="Makes the candidate the active key and deletes the previous one.",
        does=Command(make_handler(finalize_key)),
        answers={200: HmacKeyFinalized},
    ),
)
