"""Serves the dashboard: routes, sign-in, forms, errors (docs/dashboard.md).

A request passes these steps: the session of its cookie, the visitor, for a form the token and the
right to change, the quotas, the page. Everything that a page reads or does, it does through the
operations of the API (`LocalClient`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from urllib.parse import quote, urlsplit

import msgspec
from quart import Blueprint, Request, g, request
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioResponse

from conveyor.api.server import problem
from conveyor.api.server.auth import Origins
from conveyor.api.server.quota import group_address
from conveyor.api.server.request import Api, Download, Response
from conveyor.domain.errors import InvalidTasks, NotFound, Refused, Unauthenticated
from conveyor.schemas.responses import ProblemResponse
from conveyor.ui import actions, live, pages, webhook_pages
from conveyor.ui.access import COOKIE, AccessRules, Arrival, Forbidden, Gatekeeper, Session, Viewer
from conveyor.ui.render import MEDIA_TYPES, PAGE_HEADERS, STATIC, render
from conveyor.ui.system import SystemView
from conveyor.ui.visit import Page, Redirect, Visit

log = logging.getLogger(__name__)

Handler = Callable[[Visit], Awaitable[Page | Redirect | Response | Download]]

# A form holds a pasted or uploaded list. Longer lists go to the API, which stages them.
FORM_BYTES_MAX = 16 * 1024 * 1024
_STATIC_S = 3600

_JOB = "/jobs/<string:job_id>"
_RUN = _JOB + "/runs/<string:run_id>"
_TASK = _RUN + "/tasks/<string:task_id>"

VIEWS: dict[str, Handler] = {
    "/": pages.overview,
    "/jobs": pages.jobs,
    "/jobs/new": pages.new_job,
    _JOB: pages.job,
    _JOB + "/delete": pages.confirm_delete_job,
    _RUN: pages.run,
    _RUN + "/tasks": pages.tasks,
    _RUN + "/hosts": pages.hosts,
    _RUN + "/timeline": pages.timeline,
    _RUN + "/delete": pages.confirm_delete_run,
    _RUN + "/exports/<string:export_id>/file": pages.export_file,
    _TASK: pages.task,
    _TASK + "/preview": pages.preview,
    _TASK + "/content": pages.content,
    "/schedules": pages.schedules,
    "/webhooks": webhook_pages.webhooks,
    "/system": pages.system,
}
FORMS: dict[str, Handler] = {
    "/jobs/new": actions.submit_job,
    _JOB + "/pause": actions.pause,
    _JOB + "/resume": actions.resume,
    _JOB + "/stop": actions.stop,
    _JOB + "/rerun": actions.rerun,
    _JOB + "/close": actions.close,
    _JOB + "/budget": actions.set_budget,
    _JOB + "/host-limits": actions.set_host_limit,
    _JOB + "/delete": actions.delete_job,
    _JOB + "/schedule": actions.set_schedule_state,
    _RUN + "/delete": actions.delete_run,
    _RUN + "/audit": actions.audit,
    _RUN + "/export": actions.start_export,
    _JOB + "/webhook": webhook_pages.set_webhook,
    _JOB + "/webhook/remove": webhook_pages.remove_webhook,
    _JOB + "/webhook/redeliver": webhook_pages.redeliver,
    "/webhooks/test": webhook_pages.test,
    "/webhooks/keys/rotate": webhook_pages.rotate_key,
    "/webhooks/keys/finalize": webhook_pages.finalize_key,
    "/webhooks/keys/cancel": webhook_pages.cancel_rotation,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """The settings of the dashboard. `mount` adds it to an application."""

    rules: AccessRules = field(default_factory=AccessRules)
    origins: Origins = field(default_factory=Origins)
    system: SystemView = field(default_factory=SystemView)

    def mount(self, app: QuartTrio, api: Api) -> None:
        gate = Gatekeeper(env=api.env, auth=api.auth, rules=self.rules)
        site = Site(self, api, gate, live.make_stand_ins(api.env))
        ui = Blueprint("ui", __name__, url_prefix="/ui")
        for path, handler in VIEWS.items():
            _add(ui, "GET", path, partial(site.serve, handler))
        for path, handler in FORMS.items():
            _add(ui, "POST", path, partial(site.serve_form, handler))
        _add(ui, "GET", "", site.redirect_to_start)
        _add(ui, "GET", "/signin", site.show_sign_in)
        _add(ui, "POST", "/signin", site.sign_in)
        _add(ui, "POST", "/signout", site.sign_out)
        _add(ui, "GET", "/live", site.stream)
        _add(ui, "GET", "/static/<string:name>", serve_static)
        _add(ui, "GET", "/<path:rest>", site.find_nothing)
        ui.register_error_handler(Exception, site.show_error)
        app.register_blueprint(ui)


def _add(ui: Blueprint, method: str, path: str, view: Callable[..., Any]) -> None:
    ui.add_url_rule(
        path,
        endpoint=f"{method} {path}".replace(".", "_"),
        view_func=view,
        methods=[method],
        provide_automatic_options=False,
        strict_slashes=True,
    )


@dataclass(frozen=True, slots=True)
class Site:
    """A mounted dashboard."""

    dashboard: Dashboard
    api: Api
    gate: Gatekeeper
    stand_ins: live.StandIns
    shared: live.SharedFragments = field(default_factory=live.SharedFragments)

    async def serve(self, handler: Handler, **ids: str) -> TrioResponse:
        session, viewer = self._identify()
        if viewer is None:
            return _to_sign_in()
        visit = self._visit(viewer, ids)
        return self._answer(await handler(visit), session, viewer)

    async def serve_form(self, handler: Handler, **ids: str) -> TrioResponse:
        form, files = await _read_form(request)
        session, viewer = self._identify()
        if viewer is None:
            return _to_sign_in()
        self._check_form(session, form)
        viewer.require_change()
        visit = replace(self._visit(viewer, ids), form=form, files=files)
        return self._answer(await handler(visit), session, viewer)

    async def stream(self) -> TrioResponse:
        """The changes of one page. The path of the page is matched as if it were requested."""
        session, viewer = self._identify()
        page_url = urlsplit(request.args.get("page", ""))
        handler, ids = _match(page_url.path)
        if viewer is None or handler is None:
            raise NotFound("There is nothing to follow at this address.")
        visit = self._visit(viewer, ids)
        visit = replace(visit, query=live.read_query(page_url.query), is_update=True)
        values = partial(self._values, session, viewer)
        frames = await live.follow(
            visit, handler, values, self.shared, self.stand_ins, page_url.geturl()
        )
        response = TrioResponse(frames, 200, content_type="text/event-stream")
        response.headers["X-Accel-Buffering"] = "no"
        response.timeout = None
        return response

    async def redirect_to_start(self) -> TrioResponse:
        return _redirect("/ui/")

    async def find_nothing(self, rest: str) -> TrioResponse:
        raise NotFound("There is no such page.")

    async def show_sign_in(self) -> TrioResponse:
        session, viewer = self._identify()
        if viewer is not None and viewer.is_signed_in:
            return _redirect(_own_path(request.args.get("next", "")))
        return self._sign_in_page(session)

    async def sign_in(self) -> TrioResponse:
        form, _ = await _read_form(request)
        session = self._session()
        self._check_form(session, form)
        self.api.requests.admit_request(None, self._address())
        key = form.get("key", [""])[0].strip()
        is_read_only = "read_only" in form
        try:
            self.gate.viewer_of(key, is_read_only=is_read_only)
        except Unauthenticated as error:
            return self._sign_in_page(session, error.detail, status=401)
        response = _redirect(_own_path(form.get("next", [""])[0]))
        self._set_cookie(response, self.gate.new_session(key=key, is_read_only=is_read_only))
        return response

    async def sign_out(self) -> TrioResponse:
        form, _ = await _read_form(request)
        self._check_form(self._session(), form)
        response = _redirect("/ui/signin")
        response.delete_cookie(COOKIE, path="/ui")
        return response

    async def show_error(self, error: Exception) -> TrioResponse:
        """Every error as a page. The API's own table decides about status and words."""
        if isinstance(error, Forbidden):
            problem_response = _forbidden(str(error))
        else:
            if not problem.is_expected(error):
                log.error("page failed", exc_info=error, extra={"request_id": g.request_id})
            answered = problem.answer_for(error, request_id=g.request_id)
            problem_response = msgspec.json.decode(answered.content, type=ProblemResponse)
        invalid = error.invalid_tasks if isinstance(error, InvalidTasks) else ()
        session, viewer = self._identify()
        page = Page(
            "error.html",
            {"problem": problem_response, "invalid_tasks": invalid},
            problem_response.status,
        )
        response = self._answer(page, session, viewer)
        if isinstance(error, Refused) and error.retry_after_s:
            response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        return response

    def _identify(self) -> tuple[Session, Viewer | None]:
        session = self._session()
        return session, self.gate.identify(session, _arrival())

    def _session(self) -> Session:
        """The session of the cookie, or a new one without a key."""
        if "ui_session" not in g:
            stored_session = self.gate.open_session(request.cookies.get(COOKIE))
            g.ui_session = stored_session or self.gate.new_session()
            g.ui_is_new = stored_session is None
        session: Session = g.ui_session
        return session

    def _check_form(self, session: Session, form: Mapping[str, list[str]]) -> None:
        self.gate.check_form(session, _arrival(), form.get("token", [""])[0])

    def _address(self) -> str | None:
        scope = cast("dict[str, Any]", request.scope)
        return group_address(self.dashboard.origins.find_client_address(scope))

    def _visit(self, viewer: Viewer, ids: Mapping[str, str]) -> Visit:
        caller = viewer.principal.caller if viewer.principal else None
        self.api.requests.admit_request(caller, self._address())
        return Visit(
            api=self.api,
            viewer=viewer,
            system=self.dashboard.system,
            base_url=self.dashboard.origins.find_base_url(cast("dict[str, Any]", request.scope)),
            address=self._address(),
            ids=ids,
            query=request.args.to_dict(flat=True),
        )

    def _values(self, session: Session, viewer: Viewer | None) -> dict[str, Any]:
        """What every template may use."""
        return {
            "viewer": viewer,
            "token": self.gate.form_token(session),
            "once": self.api.env.new_id(),
            "now": self.api.env.now(),
            "path": request.path,
            "here": request.full_path.rstrip("?"),
        }

    def _answer(
        self,
        result: Page | Redirect | Response | Download,
        session: Session,
        viewer: Viewer | None,
    ) -> TrioResponse:
        if isinstance(result, Redirect):
            return _redirect(result.path)
        if isinstance(result, Download):
            response = TrioResponse(result.pieces, result.status)
            response.headers.update(result.headers)
            response.timeout = result.timeout_s
            return response
        if isinstance(result, Response):
            response = TrioResponse(result.content, result.status, content_type=result.media_type)
            response.headers.update(result.headers)
            return response
        text = render(result.template, {**self._values(session, viewer), **result.values})
        response = TrioResponse(text, result.status, content_type="text/html; charset=utf-8")
        response.headers.update(PAGE_HEADERS)
        if g.get("ui_is_new"):
            self._set_cookie(response, session)
        return response

    def _sign_in_page(self, session: Session, error: str = "", status: int = 200) -> TrioResponse:
        target = _own_path(request.args.get("next", ""))
        page = Page("signin.html", {"error": error, "next": target}, status)
        return self._answer(page, session, None)

    def _set_cookie(self, response: TrioResponse, session: Session) -> None:
        scope = cast("dict[str, Any]", request.scope)
        response.set_cookie(
            COOKIE,
            self.gate.seal(session),
            path="/ui",
            httponly=True,
            samesite="Strict",
            secure=self.dashboard.origins.find_base_url(scope).startswith("https:"),
        )


def _match(path: str) -> tuple[Handler | None, dict[str, str]]:
    """The page of a path, and the ids in it."""
    parts = path.removeprefix("/ui").split("/")
    for pattern, handler in VIEWS.items():
        names = pattern.split("/")
        if len(names) != len(parts) or not path.startswith("/ui/"):
            continue
        ids: dict[str, str] = {}
        for name, part in zip(names, parts, strict=True):
            if name.startswith("<"):
                ids[name[1:-1].partition(":")[2]] = part
            elif name != part:
                break
        else:
            return handler, ids
    return None, {}


def _arrival() -> Arrival:
    client = request.scope.get("client")
    return Arrival(
        cookie=request.cookies.get(COOKIE),
        peer=client[0] if client else None,
        host=request.headers.get("Host", "").lower(),
        headers={name.lower(): value for name, value in request.headers.items()},
    )


async def _read_form(form_request: Request) -> tuple[dict[str, list[str]], dict[str, bytes]]:
    form_request.max_content_length = FORM_BYTES_MAX
    form = await form_request.form
    files = await form_request.files
    return form.to_dict(flat=False), {name: files[name].read() for name in files}


async def serve_static(name: str) -> TrioResponse:
    path = STATIC / name
    if path.suffix not in MEDIA_TYPES or path.parent != STATIC or not path.is_file():
        raise NotFound("There is no such file.")
    response = TrioResponse(path.read_bytes(), content_type=MEDIA_TYPES[path.suffix])
    # The pages name the version of the files, so that a browser keeps none of an older version.
    response.headers["Cache-Control"] = f"public, max-age={_STATIC_S}"
    response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
    return response


def _forbidden(detail: str) -> ProblemResponse:
    return ProblemResponse(
        type="about:blank", title="Not allowed", status=403, code="forbidden", detail=detail
    )


def _own_path(path: str) -> str:
    """A path of the dashboard, so that a link to the sign-in page cannot lead elsewhere."""
    is_own = path.startswith("/ui/") and path.isprintable() and "\\" not in path
    return path if is_own else "/ui/"


def _to_sign_in() -> TrioResponse:
    target = request.full_path.rstrip("?") if request.method == "GET" else "/ui/"
    return _redirect(f"/ui/signin?next={quote(target, safe='/')}")


def _redirect(path: str) -> TrioResponse:
    response = TrioResponse("", 303)
    response.headers["Location"] = path
    return response
