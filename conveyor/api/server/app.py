"""The application: a plain factory that ties the route table to Quart (docs/api.md, Conventions).

Requests that change state run under a shield: a client that disconnects cancels its handler, and a
write that has begun must end. The last error handler is the only `except Exception` here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import trio
from quart import g, request
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioResponse

from conveyor.api.routes.route import DRY_RUN, Access, Command, Query, Route, Upload
from conveyor.api.routes.table import ROUTES
from conveyor.api.server import problem
from conveyor.api.server.auth import Authenticator, Passthrough, Principal, read_key
from conveyor.api.server.openapi import make_document
from conveyor.api.server.origin import Origins
from conveyor.api.server.problem import Answered, NotReady, OutOfTime
from conveyor.api.server.quota import RequestQuotas, group_address
from conveyor.api.server.request_body import (
    BODY_TIMEOUT_S,
    body_pieces,
    read_start,
    require_json,
    require_plain,
    take_body,
)
from conveyor.api.server.request_context import (
    JSON,
    Api,
    Download,
    RequestContext,
    Response,
    StreamHandler,
    Work,
)
from conveyor.api.server.server import asgi_guard
from conveyor.api.streaming_submit import (
    StreamingList,
    hash_while_reading,
    retry_later,
    stage_stream,
    use_or_delete,
)
from conveyor.domain import idempotency, limits
from conveyor.domain.errors import InvalidArgument, NotFound, Refused
from conveyor.domain.idempotency import Fingerprint
from conveyor.domain.quota import QuotaExceeded
from conveyor.http_client.large_bodies import Decoding
from conveyor.ports.errors import Unavailable
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.schemas.requests import escape_pointer
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.idempotency import (
    ResponseSealer,
    StoredResponse,
    find_key_record,
    run_once_per_key,
)
from conveyor.usecases.quota import StorageQuotas

log = logging.getLogger(__name__)

# The simulator distinguishes this message from an error of the program.
OUTAGE_LOGGED = "request failed: storage unavailable"

# Less than the 60 s after which common load balancers give up: the client gets our 503 with
# Retry-After, and not a 504.
WORK_TIMEOUT_S = 55.0
# A longer X-Request-ID is replaced: the value goes into logs and response headers.
REQUEST_ID_CHARS_MAX = 128

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_VARIABLE = re.compile(r"\{(\w+)\}")


def make_app(
    env: Context,
    auth: Authenticator,
    *,
    notifier: WebhookSender,
    metrics: Metrics,
    ready: Callable[[], bool],
    inspect: Callable[[], object] | None = None,
    origins: Origins = Origins(),  # noqa: B008 (a frozen value)
) -> QuartTrio:
    """Builds the API over these ports.

    `inspect` returns the tree of actors, for every client that can reach the port. `origins` knows
    the public URL and the trusted proxies.
    """
    api = Api(
        env=env,
        auth=auth,
        notifier=notifier,
        metrics=metrics,
        is_ready=ready,
        inspect=inspect,
        document=_document(),
        decoding=Decoding(env.executor),
        # If any key is accepted, a client can invent any number of callers. Count addresses too.
        requests=RequestQuotas(env.policy.quotas, counts_addresses=isinstance(auth, Passthrough)),
        storage=StorageQuotas(env, env.policy.quotas),
    )
    app = QuartTrio("conveyor", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = limits.REQUEST_BYTES_MAX
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    app.url_map.merge_slashes = False
    for route in ROUTES:
        app.add_url_rule(
            _VARIABLE.sub(r"<string:\1>", route.path),
            endpoint=route.name,
            view_func=partial(_serve, api, route, origins),
            methods=[route.method],
            provide_automatic_options=False,
            strict_slashes=True,
        )
    app.before_request(partial(_begin, env))
    app.after_request(partial(_finish, metrics))
    app.register_error_handler(Exception, partial(_on_error, metrics))
    app.asgi_app = asgi_guard(app.asgi_app, env, metrics)  # type: ignore[method-assign, assignment, arg-type]
    return app


@cache
def _document() -> bytes:
    return make_document(ROUTES)


async def _begin(env: Context) -> None:
    given = request.headers.get("X-Request-ID", "")
    is_sane = 0 < len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable()
    g.request_id = given if is_sane else env.new_id()
    g.begun_at = trio.current_time()
    # The server and the router both normalise paths. Refuse a path that would match in a form other
    # than the one that was sent.
    sent = request.scope.get("raw_path", b"").lower()
    if b"//" in sent or b"%2f" in sent:
        raise NotFound("There is nothing at this address.")


async def _finish(metrics: Metrics, response: TrioResponse) -> TrioResponse:
    response.headers["X-Request-ID"] = g.request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Cache-Control", "no-store")
    method = request.method if request.method in _METHODS else "OTHER"
    route = request.url_rule.rule if request.url_rule is not None else "none"
    seconds = trio.current_time() - g.begun_at
    metrics.http_requests.labels(method, route, str(response.status_code)).inc()
    metrics.http_seconds.labels(method, route).observe(seconds)
    fields = {"method": method, "route": route, "status": response.status_code}
    log.info("request", extra={**fields, "request_id": g.request_id, "seconds": round(seconds, 4)})
    return response


async def _on_error(metrics: Metrics, error: Exception) -> TrioResponse:
    if isinstance(error, QuotaExceeded):
        metrics.quota_refusals.labels(error.quota).inc()
    if not problem.is_foreseen(error):
        log.error("request failed", exc_info=error, extra={"request_id": g.request_id})
    elif isinstance(error, Unavailable):
        _log_outage(error)
    elif isinstance(error, OutOfTime) and not isinstance(error, NotReady):
        extra = {"request_id": g.request_id, "cause": error.detail}
        log.warning("request failed: out of time", extra=extra)
    return _problem_response(problem.answer_for(error, request_id=g.request_id))


def _log_outage(error: Unavailable) -> None:
    """Logs the cause, which the response does not contain.

    A cause that needs the operator, such as a missing permission, is logged as an error.
    """
    level = logging.ERROR if error.needs_operator else logging.WARNING
    code = error.code or type(error).__name__
    fields = {"request_id": g.request_id, "cause": str(error), "code": code}
    log.log(level, OUTAGE_LOGGED, extra=fields)


def _problem_response(answered: Answered) -> TrioResponse:
    response = TrioResponse(answered.content, answered.status, content_type=problem.MEDIA_TYPE)
    response.headers.update(answered.headers)
    return response


async def _serve(api: Api, route: Route, origins: Origins, **ids: str) -> TrioResponse:
    scope = cast("dict[str, Any]", request.scope)
    call = RequestContext(
        api=api,
        principal=_principal(api.auth, route),
        ids=ids,
        query=request.args.to_dict(flat=False),
        base_url=origins.find_base_url(scope),
        headers={name.lower(): value for name, value in request.headers.items()},
        address=group_address(origins.find_client_address(scope)),
    )
    _check_query(route, call)
    if route.access is not Access.PUBLIC:
        caller = None if call.principal is None else call.principal.caller
        api.requests.admit_request(caller, call.address)
    match route.does:
        case Query(handler):
            return _response_from(await handler(call))
        case Upload(handler, bytes_max):
            return _response_from(await _take(call, handler, bytes_max))
        case Command() as does:
            key = _key_from(route)
            if DRY_RUN in route.query and call.is_dry_run:
                # A dry run stores nothing: no key record and no staged list.
                key, does = None, replace(does, long=None)
            return _response_from(await _write(call, does, key))


def _check_query(route: Route, call: RequestContext) -> None:
    """Refuses unknown parameters: a misspelt filter would otherwise select everything."""
    known = {parameter.name for parameter in route.query}
    for name in call.query:
        if name not in known:
            shown = repr(name[:64])
            raise InvalidArgument(
                f"{shown} is not a parameter of this operation.",
                pointer=f"/{escape_pointer(name)}",
            )
        call.parameter(name)


async def _take(call: RequestContext, handler: StreamHandler, bytes_max: int) -> Response:
    require_plain(request)
    async with aclosing(take_body(request, bytes_max=bytes_max)) as pieces:
        return await handler(call, pieces)


async def _write(call: RequestContext, does: Command, key: str | None) -> Response:
    """Checks the request, then claims the Idempotency-Key and runs the work.

    The order matters: a malformed request must not use up its key.
    """
    if does.payload is None:
        require_plain(request)
    else:
        require_json(request)
    bytes_max = does.body_bytes_max
    inflated = body_pieces(
        request,
        bytes_max=bytes_max,
        sent=call.sent,
        decoding=call.api.decoding,
        partition=call.principal.caller if call.principal else "",
    )
    async with aclosing(inflated) as pieces:
        whole_max = bytes_max if does.long is None else limits.LONG_BODY_BYTES
        body, is_whole = await read_start(pieces, bytes_max=whole_max)
        if not is_whole and does.long is not None:
            return await _write_long(call, does, does.long, key, body, pieces)
    work = does.handler(replace(call, body=body))
    asked = _asked(call, key, idempotency.fingerprint(body, request.query_string))
    return await _do(call, does, asked, work)


async def _write_long(
    call: RequestContext,
    does: Command,
    takes: StreamingList,
    key: str | None,
    start: bytes,
    rest: AsyncIterable[bytes],
) -> Response:
    """As `_write`, for a list that is staged while it arrives, under the id that it will have."""
    fingerprint = Fingerprint(request.query_string)
    begun = None
    if (asked := _asked(call, key, "")) is not None:
        begun = await find_key_record(call.env, asked.key_id)
    subject = call.env.new_id() if begun is None else begun.subject
    async with aclosing(hash_while_reading(start, rest, fingerprint)) as counted:
        if begun is not None and begun.response_status is not None:
            # The key has a stored response. Read the body for its fingerprint only.
            async for _ in counted:
                pass
            return await _do(call, does, _asked(call, key, str(fingerprint)), retry_later)
        arrived = await stage_stream(call, takes, subject, counted)
    asked = _asked(call, key, str(fingerprint))
    return await use_or_delete(
        call.env, arrived, partial(_do, call, does, asked, arrived.bind(subject), subject)
    )


def _asked(call: RequestContext, key: str | None, fingerprint: str) -> idempotency.Request | None:
    if key is None:
        return None
    return idempotency.Request(
        caller=call.caller,
        method=request.method,
        path=request.path,
        key=key,
        fingerprint=fingerprint,
    )


async def _do(
    call: RequestContext,
    does: Command,
    asked: idempotency.Request | None,
    work: Work,
    subject: str | None = None,
) -> Response:
    # Shielded against a client that disconnects, and bounded, so that shutdown does not wait for
    # ever.
    with trio.move_on_after(WORK_TIMEOUT_S, shield=True):
        if asked is None:
            return await work(subject or call.env.new_id())
        refused = partial(_refused, request_id=g.request_id)
        answered = partial(_answered, work)
        if not does.is_secret:
            return _reply_from(
                await run_once_per_key(call.env, asked, answered, refused, subject=subject)
            )
        envelope = ResponseSealer(call.env.secret_box, f"{call.caller}|answer|{asked.key_id}")
        sealed = await run_once_per_key(call.env, asked, envelope.sealing(answered), refused)
        return _reply_from(envelope.open(sealed))
    raise OutOfTime("The work took too long; ask again.", retry_after_s=5)


def _principal(auth: Authenticator, route: Route) -> Principal | None:
    if route.access is Access.PUBLIC:
        return None
    if route.access is Access.LINK and "token" in request.args:
        return None
    return auth.identify(read_key(request.headers.getlist("X-API-Key")))


def _key_from(route: Route) -> str | None:
    keys = request.headers.getlist("Idempotency-Key") if route.method == "POST" else []
    if len(keys) > 1:
        raise InvalidArgument("Send one Idempotency-Key.", code="invalid_idempotency_key")
    return idempotency.check_key(keys[0]) if keys else None


async def _answered(work: Work, subject: str) -> StoredResponse:
    reply = await work(subject)
    return StoredResponse(reply.status, reply.content.decode())


def _refused(refusal: Refused, *, request_id: str) -> StoredResponse:
    return StoredResponse(refusal.status, problem.refusal_body(refusal, request_id=request_id))


def _reply_from(answer: StoredResponse) -> Response:
    media_type = JSON if answer.status < 400 else problem.MEDIA_TYPE
    return Response(answer.status, answer.body.encode(), media_type)


def _response_from(reply: Response | Download) -> TrioResponse:
    if isinstance(reply, Download):
        response = TrioResponse(reply.pieces, reply.status)
        response.headers.update(reply.headers)
        response.timeout = reply.timeout_s
        return response
    response = TrioResponse(reply.content, reply.status, content_type=reply.media_type)
    response.headers.update(reply.headers)
    if not reply.content:
        del response.headers["Content-Type"]
    return response
