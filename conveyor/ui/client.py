"""Calls the operations of the API from within the process. The pages can do nothing else, so that
they show to no visitor what the API would not, and everything they do is open to every client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from conveyor.api.route import Command, Query, Route
from conveyor.api.server.app import ROUTES, WORK_TIMEOUT_S
from conveyor.api.server.auth import Principal
from conveyor.api.server.problem import OutOfTime, refusal_body
from conveyor.api.server.request import Api, Download, RequestContext, Response, Sent
from conveyor.domain import idempotency
from conveyor.domain.errors import Refused
from conveyor.schemas.responses import ProblemResponse
from conveyor.usecases.idempotency import StoredResponse, run_once_per_key

_OPERATIONS: dict[str, Route] = {route.name: route for route in ROUTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalClient:
    """The operations, as one caller may use them."""

    api: Api
    principal: Principal
    base_url: str
    address: str | None = None

    async def get(
        self, operation: str, ids: Mapping[str, str] | None = None, /, **query: str | None
    ) -> Any:
        """Performs an operation that reads, and returns its response."""
        reply = await self.fetch(operation, ids, **query)
        assert isinstance(reply, Response)
        return _decode(_OPERATIONS[operation], reply)

    async def fetch(
        self, operation: str, ids: Mapping[str, str] | None = None, /, **query: str | None
    ) -> Response | Download:
        """As `get`, without decoding, for bodies and files."""
        route = _OPERATIONS[operation]
        assert isinstance(route.does, Query)
        return await route.does.handler(self._call(ids, query))

    async def do(
        self,
        operation: str,
        ids: Mapping[str, str] | None = None,
        /,
        *,
        body: object = None,
        once: str | None = None,
        **query: str | None,
    ) -> Any:
        """Performs an operation that changes something, and returns its response.

        A form that is sent twice has the same `once`, and is performed once.
        """
        route = _OPERATIONS[operation]
        assert isinstance(route.does, Command)
        content = b"" if body is None else msgspec.json.encode(body)
        work = route.does.handler(self._call(ids, query, content))
        # As for requests: a visitor who leaves must not interrupt a write.
        with trio.move_on_after(WORK_TIMEOUT_S, shield=True):
            if once is None:
                return _decode(route, await work(self.api.env.new_id()))

            async def answer(subject: str) -> StoredResponse:
                reply = await work(subject)
                return StoredResponse(reply.status, reply.content.decode())

            request = idempotency.Request(
                caller=self.principal.caller,
                method=route.method,
                path=f"/ui/{operation}",
                key=once,
                fingerprint=idempotency.fingerprint(content, repr(sorted(query.items())).encode()),
            )
            stored = await run_once_per_key(self.api.env, request, answer, _refusal)
            return _decode(route, Response(stored.status, stored.body.encode()))
        raise OutOfTime("The work took too long; ask again.", retry_after_s=5)

    def _call(
        self,
        ids: Mapping[str, str] | None,
        query: Mapping[str, str | None],
        body: bytes = b"",
    ) -> RequestContext:
        return RequestContext(
            api=self.api,
            principal=self.principal,
            ids=ids or {},
            query={name: [value] for name, value in query.items() if value is not None},
            base_url=self.base_url,
            body=body,
            sent=Sent(len(body)),
            address=self.address,
        )


class RepeatedRefusal(Refused):
    """A refusal that was stored under the `once` of a form."""

    def __init__(self, problem: ProblemResponse) -> None:
        super().__init__(problem.detail or problem.title)
        self.status = problem.status
        self.title = problem.title
        self.invalid_tasks = tuple(problem.invalid_tasks)


def _refusal(refusal: Refused) -> StoredResponse:
    return StoredResponse(refusal.status, refusal_body(refusal, request_id=""))


def _decode(route: Route, reply: Response) -> Any:
    if reply.status >= 400:
        raise RepeatedRefusal(msgspec.json.decode(reply.content, type=ProblemResponse))
    kind = route.answers.get(reply.status)
    return msgspec.json.decode(reply.content, type=kind) if isinstance(kind, type) else None
