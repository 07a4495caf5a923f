"""The routes of webhooks and signing keys (docs/api.md, Webhooks)."""

from __future__ import annotations

from conveyor.api import webhook
from conveyor.api.routes.route import CURSOR, LIMIT, Command, Query, Route
from conveyor.schemas import requests
from conveyor.schemas import webhooks as shapes
from conveyor.schemas.responses import WebhookResponse

_WEBHOOK = "/v1/jobs/{job_id}/webhook"
_KEYS = "/v1/hmac/keys"

WEBHOOK_ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path=_WEBHOOK,
        name="getJobWebhook",
        tag="jobs",
        summary="Show the webhook of a job",
        does=Query(webhook.get_webhook),
        answers={200: WebhookResponse},
        problems=(404,),
    ),
    Route(
        method="PUT",
        path=_WEBHOOK,
        name="putJobWebhook",
        tag="jobs",
        summary="Set the webhook of a job, for every delivery not made yet",
        does=Command(webhook.put_webhook, requests.WebhookConfigInput),
        answers={200: WebhookResponse},
        problems=(400, 404, 413, 415, 503),
    ),
    Route(
        method="DELETE",
        path=_WEBHOOK,
        name="deleteJobWebhook",
        tag="jobs",
        summary="Remove the webhook of a job and drop what was not delivered",
        does=Command(webhook.delete_webhook),
        answers={204: None},
        problems=(404, 503),
    ),
    Route(
        method="GET",
        path=_WEBHOOK + "/deliveries",
        name="listJobWebhookDeliveries",
        tag="jobs",
        summary="List the events of a job and the tries at delivering them, newest first",
        does=Query(webhook.list_deliveries),
        answers={200: shapes.ListDeliveriesResponse},
        problems=(400, 404),
        query=(LIMIT, CURSOR),
    ),
    Route(
        method="POST",
        path=_WEBHOOK + "/deliveries/{event_id}/redeliver",
        name="redeliverJobWebhookEvent",
        tag="jobs",
        summary="Deliver an event once more",
        does=Command(webhook.redeliver),
        answers={202: shapes.DeliveryResponse},
        problems=(404, 409, 503),
    ),
    Route(
        method="POST",
        path="/v1/webhook/test",
        name="testWebhook",
        tag="webhook",
        summary="Send a test event to a receiver and tell how it took it",
        does=Command(webhook.test_webhook, requests.WebhookInput),
        answers={200: shapes.WebhookTestResponse},
        problems=(400, 413, 415, 503),
    ),
    Route(
        method="GET",
        path=_KEYS,
        name="listHMACKeys",
        tag="hmac",
        summary="Show your signing keys, without their secrets",
        does=Query(webhook.list_keys),
        answers={200: shapes.HmacKeyList},
    ),
    Route(
        method="POST",
        path=_KEYS + "/rotate",
        name="rotateHMACKey",
        tag="hmac",
        summary="Make the first signing key, or a candidate to follow it",
        does=Command(webhook.rotate_key, is_secret=True),
        answers={201: shapes.HmacKeyCreated},
        problems=(409, 503),
    ),
    Route(
        method="DELETE",
        path=_KEYS + "/rotate",
        name="cancelHMACRotation",
        tag="hmac",
        summary="Drop the candidate",
        does=Command(webhook.cancel_rotation),
        answers={204: None},
        problems=(409, 503),
    ),
    Route(
        method="POST",
        path=_KEYS + "/rotate/finalize",
        name="finalizeHMACKey",
        tag="hmac",
        summary="Make the candidate the active key",
        does=Command(webhook.finalize_key),
        answers={200: shapes.HmacKeyFinalized},
        problems=(409, 503),
    ),
)
