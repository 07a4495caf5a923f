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

from conveyor.api import (
    crawl,
    events,
    export,
    jobs,
    operations,
    results,
    runs,
    schedule,
    upload,
    webhook,
)
from conveyor.api.route import DRY_RUN, Access, Command, Query, Route, Upload
from conveyor.api.server import problem
from conveyor.api.server.auth import Authenticator, Origins, Passthrough, Principal, read_key
from conveyor.api.server.openapi import make_document
from conveyor.api.server.problem import Answered, NotReady, OutOfTime
from conveyor.api.server.quota import RequestQuotas, group_address
from conveyor.api.server.request import (
    BODY_TIMEOUT_S,
    JSON,
    Api,
    Download,
    RequestContext,
    Response,
    StreamHandler,
    Work,
    body_pieces,
    read_start,
    require_json,
    require_plain,
    take_body,
)
from conveyor.api.server.server import asgi_guard
from conveyor.api.streaming_submit import StreamingSubmit, hash_while_reading, retry_later
from conveyor.domain import idempotency, limits
from conveyor.domain.errors import InvalidArgument, NotFound, Refused
from conveyor.domain.idempotency import Fingerprint
from conveyor.domain.quota import QuotaExceeded
from conveyor.http_client.large_bodies import Decoding
from conveyor.logs import REQUEST_ID
from conveyor.ports.errors import Unavailable
from conveyor.ports.tracer import SpanKind, SpanRecord
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.schemas.requests import check_no_options, escape_pointer
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.idempotency import (
    ResponseSealer,
    StoredResponse,
    find_key_record,
    run_once_per_key,
)
from conveyor.usecases.quota import StorageQuotas
from conveyor.usecases.tracing import begin_request

log = logging.getLogger(__name__)

# The simulator distinguishes this message from an error of the program.
OUTAGE_LOGGED = "request failed: storage unavailable"

# Less than the 60 s after which common load balancers give up: the client gets our 503 with
# Retry-After, and not a 504.
WORK_TIMEOUT_S = 55.0
# A longer X-Request-ID is replaced: the value goes into logs and response headers.
REQUEST_ID_CHARS_MAX = 128
# Asked for every few seconds by load balancers and scrapers: no log line each.
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})

# The most bytes of a body where no fields are expected.
EMPTY_BODY_BYTES_MAX = 64 * 1024

# The application registers these routes, and the OpenAPI document describes them.
ROUTES: tuple[Route, ...] = (
    *jobs.ROUTES,
    *runs.ROUTES,
    *results.ROUTES,
    *export.ROUTES,
    *schedule.ROUTES,
    *crawl.ROUTES,
    *upload.ROUTES,
    *events.ROUTES,
    *webhook.ROUTES,
    *operations.ROUTES,
)

# Requests that change nothing are not traced: clients poll.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_VARIABLE = re.compile(r"\{(\w+)\}")


def make_app(  # noqa: PLR0913 (ports and options, each by name)
    env: Context,
    auth: Authenticator,
    *,
    notifier: WebhookSender,
    metrics: Metrics,
    ready: Callable[[], bool],
    inspect: Callable[[], object] | None = None,
    origins: Origins = Origins(),  # noqa: B008 (a frozen value)
    mount: Callable[[QuartTrio, Api], None] | None = None,
) -> QuartTrio:
    """Builds the API over these ports.

    `inspect` returns the tree of actors, for every client that can reach the port. `origins` knows
    the public URL and the trusted proxies. `mount` adds further routes, such as the dashboard.
    """
    api = Api(
        env=env,
        auth=auth,
        notifier=notifier,
        metrics=metrics,
        is_ready=ready,
        inspect=inspect,
        document=_document,
        decoding=Decoding(env.executor),
        # If any key is accepted, a client can invent any number of callers. Count addresses too.
        requests=RequestQuotas(env.config.quotas, counts_addresses=isinstance(auth, Passthrough)),
        storage=StorageQuotas(env, env.config.quotas),
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
    if mount is not None:
        mount(app, api)
    app.before_request(partial(_begin, env))
    app.after_request(partial(_finish, env, metrics))
    app.register_error_handler(Exception, partial(_on_error, metrics))
    app.asgi_app = asgi_guard(app.asgi_app, env, metrics)  # type: ignore[method-assign, assignment, arg-type]
    return app


@cache
def _document() -> bytes:
    return make_document(ROUTES)


async def _begin(env: Context) -> None:
    name = request.headers.get("X-Request-ID", "")
    is_valid = 0 < len(name) <= REQUEST_ID_CHARS_MAX and name.isascii() and name.isprintable()
    g.request_id = name if is_valid else env.new_id()
    REQUEST_ID.set(g.request_id)
    g.begun_at = trio.current_time()
    g.traced = None if env.tracer is None else begin_request()
    # The server and the router both normalise paths. Refuse a path that would match in a form other
    # than the one that was sent.
    path = request.scope.get("raw_path", b"").lower()
    if b"//" in path or b"%2f" in path:
        raise NotFound("This path does not exist. See /docs.")


async def _finish(env: Context, metrics: Metrics, response: TrioResponse) -> TrioResponse:
    response.headers["X-Request-ID"] = g.request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Cache-Control", "no-store")
    method = request.method if request.method in _METHODS else "OTHER"
    route = request.url_rule.rule if request.url_rule is not None else "none"
    seconds = trio.current_time() - g.begun_at
    metrics.http_requests.labels(method, route, str(response.status_code)).inc()
    metrics.http_seconds.labels(method).observe(seconds)
    if route in PROBES:
        return response
    if env.tracer is not None and method not in _SAFE_METHODS:
        env.tracer.record(_request_span(env, method, route, response.status_code, seconds))
    fields = {"method": method, "route": route, "status": response.status_code}
    log.info("request", extra={**fields, "request_id": g.request_id, "seconds": round(seconds, 4)})
    return response


def _request_span(env: Context, method: str, route: str, status: int, seconds: float) -> SpanRecord:
    now = env.now()
    return SpanRecord(
        name=f"{method} {route}",
        kind=SpanKind.SERVER,
        started_at=now - seconds,
        ended_at=now,
        attributes={
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "conveyor.request_id": g.request_id,
        },
        is_error=status >= 500,
        run_id=g.traced.run_id,
        parent=request.headers.get("traceparent"),
    )


async def _on_error(metrics: Metrics, error: Exception) -> TrioResponse:
    if isinstance(error, QuotaExceeded):
        metrics.quota_refusals.labels(error.quota).inc()
    if not problem.is_expected(error):
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


def _problem_response(answer: Answered) -> TrioResponse:
    response = TrioResponse(answer.content, answer.status, content_type=problem.MEDIA_TYPE)
    response.headers.update(answer.headers)
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
        case Command() as command:
            key = _key_from(route)
            if DRY_RUN in route.query and call.is_dry_run:
                # A dry run stores nothing: no key record and no staged list.
                key, command = None, replace(command, long=None)
            return _response_from(await _run_command(call, command, key))


def _check_query(route: Route, call: RequestContext) -> None:
    """Refuses unknown parameters: a misspelt filter would otherwise select everything."""
    known = {parameter.name for parameter in route.query}
    for name in call.query:
        if name not in known:
            raise InvalidArgument(
                f"{name[:64]!r} is not a parameter of this operation.",
                pointer=f"/{escape_pointer(name)}",
            )
        call.parameter(name)


async def _take(call: RequestContext, handler: StreamHandler, bytes_max: int) -> Response:
    require_plain(request)
    async with aclosing(take_body(request, bytes_max=bytes_max)) as pieces:
        return await handler(call, pieces)


async def _run_command(call: RequestContext, command: Command, key: str | None) -> Response:
    """Checks the request, then claims the Idempotency-Key and runs the work.

    The order matters: a malformed request must not use up its key.
    """
    has_no_type = not request.mimetype and command.is_body_optional
    if command.payload is None or has_no_type:
        require_plain(request)
    else:
        require_json(request)
    bytes_max = limits.REQUEST_BYTES_MAX
    if command.payload is None or has_no_type:
        bytes_max = EMPTY_BODY_BYTES_MAX
    inflated = body_pieces(
        request,
        bytes_max=bytes_max,
        sent=call.sent,
        decoding=call.api.decoding,
        partition=call.principal.caller if call.principal else "",
    )
    async with aclosing(inflated) as pieces:
        whole_max = bytes_max if command.long is None else limits.LONG_BODY_BYTES
        body, is_whole = await read_start(pieces, bytes_max=whole_max)
        if not is_whole and command.long is not None:
            return await _run_streaming(call, command, command.long, key, body, pieces)
    if command.payload is None:
        check_no_options(body)
    work = command.handler(replace(call, body=body))
    keyed = _keyed_request(call, key, idempotency.fingerprint(body, request.query_string))
    return await _perform(call, command, keyed, work)


async def _run_streaming(
    call: RequestContext,
    command: Command,
    streaming: type[StreamingSubmit],
    key: str | None,
    start: bytes,
    rest: AsyncIterable[bytes],
) -> Response:
    """As `_run_command`, for a list that is staged while it arrives, under the id that the work
    will use.
    """
    fingerprint = Fingerprint(request.query_string)
    record = None
    if (keyed := _keyed_request(call, key, "")) is not None:
        record = await find_key_record(call.env, keyed.key_id)
    resource_id = call.env.new_id() if record is None else record.subject
    submit = streaming(call, resource_id)
    async with aclosing(hash_while_reading(start, rest, fingerprint)) as pieces:
        if record is not None and record.response_status is not None:
            # The key has a stored response. Read the body for its fingerprint only.
            async for _ in pieces:
                pass
            keyed = _keyed_request(call, key, str(fingerprint))
            return await _perform(call, command, keyed, retry_later)
        await submit.stage(pieces)
    keyed = _keyed_request(call, key, str(fingerprint))
    return await submit.finish(partial(_perform, call, command, keyed, resource_id=resource_id))


def _keyed_request(
    call: RequestContext, key: str | None, fingerprint: str
) -> idempotency.Request | None:
    if key is None:
        return None
    return idempotency.Request(
        caller=call.caller,
        method=request.method,
        path=request.path,
        key=key,
        fingerprint=fingerprint,
    )


async def _perform(
    call: RequestContext,
    command: Command,
    keyed: idempotency.Request | None,
    work: Work,
    resource_id: str | None = None,
) -> Response:
    """Runs the work, once for each Idempotency-Key if the request has one."""
    # Shielded against a client that disconnects, and bounded, so that shutdown does not wait for
    # ever.
    with trio.move_on_after(WORK_TIMEOUT_S, shield=True):
        if keyed is None:
            return await work(resource_id or call.env.new_id())
        to_refusal = partial(_storable_refusal, request_id=g.request_id)
        storable_work = partial(_run_for_storing, work)
        if not command.is_secret:
            stored = await run_once_per_key(
                call.env, keyed, storable_work, to_refusal, subject=resource_id
            )
            return _response_of(stored)
        sealer = ResponseSealer(call.env.secret_box, f"{call.caller}|answer|{keyed.key_id}")
        sealed = await run_once_per_key(call.env, keyed, sealer.sealing(storable_work), to_refusal)
        return _response_of(sealer.open(sealed))
    raise OutOfTime("The server did not finish in time. Send the request again.", retry_after_s=5)


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


async def _run_for_storing(work: Work, resource_id: str) -> StoredResponse:
    response = await work(resource_id)
    return StoredResponse(response.status, response.content.decode())


def _storable_refusal(refusal: Refused, *, request_id: str) -> StoredResponse:
    return StoredResponse(refusal.status, problem.refusal_body(refusal, request_id=request_id))


def _response_of(stored: StoredResponse) -> Response:
    media_type = JSON if stored.status < 400 else problem.MEDIA_TYPE
    return Response(stored.status, stored.body.encode(), media_type)


def _response_from(answer: Response | Download) -> TrioResponse:
    if isinstance(answer, Download):
        response = TrioResponse(answer.pieces, answer.status)
        response.headers.update(answer.headers)
        response.timeout = answer.timeout_s
        return response
    response = TrioResponse(answer.content, answer.status, content_type=answer.media_type)
    response.headers.update(answer.headers)
    if not answer.content:
        del response.headers["Content-Type"]
    return response
