"""One request to the dashboard, in the form that pages get, and the pages that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.api.server.auth import Principal
from conveyor.api.server.request import Api
from conveyor.domain.changes import JobKey
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import Job
from conveyor.ui.access import Forbidden, Viewer
from conveyor.ui.client import LocalClient
from conveyor.ui.system import SystemView
from conveyor.usecases.context import Context


@dataclass(frozen=True, slots=True)
class Page:
    """A template and its values."""

    template: str
    values: dict[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirect:
    """An answer to a form: the browser opens another page of the dashboard."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of a visitor who is signed in. `form` is empty unless the request is a POST.

    `is_update` if only the blocks that change while a page is open are asked for.
    """

    api: Api
    viewer: Viewer
    system: SystemView
    base_url: str
    address: str | None
    ids: Mapping[str, str]
    query: Mapping[str, str]
    form: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_update: bool = False

    @property
    def env(self) -> Context:
        return self.api.env

    @property
    def principal(self) -> Principal:
        """The caller whose own lists are shown. An operator's key has none."""
        if self.viewer.principal is None:
            raise Forbidden("An operator has no jobs of its own: sign in with an API key.")
        return self.viewer.principal

    @property
    def is_still_accepted(self) -> bool:
        """Whether the key of the visitor has not been revoked since the request began."""
        principal = self.viewer.principal
        return principal is None or self.api.auth.lets_in(principal.caller)

    def own(self) -> LocalClient:
        return self._client(self.principal)

    def client_of(self, caller: CallerId) -> LocalClient:
        return self._client(Principal(caller, None))

    async def client_for(self, job_id: str) -> LocalClient:
        """The client for one job: an operator acts for the owner of the job."""
        if not self.viewer.is_operator:
            return self.own()
        job = await self._find(job_id)
        own = self.viewer.principal
        return self._client(
            own if own and own.caller == job.caller else Principal(job.caller, None)
        )

    async def _find(self, job_id: str) -> Job:
        job = await self.env.store.read(JobKey(JobId(job_id)))
        if job is None or job.status not in JOB_VISIBLE:
            raise NotFound("There is no such job.")
        return job

    def _client(self, principal: Principal) -> LocalClient:
        return LocalClient(
            api=self.api, principal=principal, base_url=self.base_url, address=self.address
        )

    def field(self, name: str) -> str:
        """The text of a form field, without surrounding space; empty if it is missing."""
        values = self.form.get(name) or [""]
        return values[0].strip()
