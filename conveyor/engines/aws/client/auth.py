"""Authentication: credentials, region and endpoints (docs/engines.md, AWS client).

botocore resolves the credentials, in a thread. Its chain knows the environment, profiles, ECS and
EC2 roles, and `AWS_ENDPOINT_URL` with its per-service forms. Writing this again would only add
bugs. Keys that expire are renewed some minutes before they do. While one call renews them, the
others continue with the present keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import botocore.exceptions
import botocore.session
import trio

from conveyor.domain.submit.target import BadUrl, Target, parse_url
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws_signature import Credentials

log = logging.getLogger(__name__)

# The time between two checks with botocore, which renews keys 15 minutes before they expire. A
# check for every call would need a thread for every call.
CHECK_EVERY_S = 10.0
# How long a lookup of keys or of an endpoint may take. A role's keys come over the network.
FOUND_WITHIN_S = 5.0
# Keys are used without waiting for their renewal only if they stay valid for so long. With a
# smaller margin a call could arrive with keys that expired on its way.
GOOD_FOR_S = 60.0

# botocore itself reads only AWS_DEFAULT_REGION. The other SDKs and the container platforms use
# AWS_REGION, which also wins in version 2 of the AWS CLI.
_REGION_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}

# The service that issues a role's keys may refuse. botocore raises RuntimeError for keys that are
# still expired after a renewal.
_CREDENTIAL_ERRORS = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    RuntimeError,
    trio.TooSlowError,
)


class AwsAccess(Protocol):
    """Raises NoResponse if keys or an endpoint cannot be resolved for now."""

    @property
    def region(self) -> str: ...

    async def credentials(self) -> Credentials: ...

    async def endpoint(self, service: str) -> Target: ...


@dataclass(frozen=True, slots=True)
class StaticAccess:
    """Given keys and endpoints, for tests and benchmarks."""

    region: str
    keys: Credentials
    endpoints: Mapping[str, str]

    async def credentials(self) -> Credentials:
        return self.keys

    async def endpoint(self, service: str) -> Target:
        return _target(self.endpoints[service])


@dataclass(slots=True)
class ResolvedAccess:
    """Keys and endpoints from botocore's chain. Create one with `find_access`, and share it."""

    session: Any
    region: str
    _source: Any
    _keys: Credentials
    _now: Callable[[], float]
    _lock: trio.Lock = field(default_factory=trio.Lock)
    _endpoints: dict[str, Target] = field(default_factory=dict)
    _check_at: float = 0.0

    async def credentials(self) -> Credentials:
        # While another task renews (the lock is taken) and the keys are good, do not wait.
        is_due = trio.current_time() >= self._check_at
        if is_due and not (self._lock.locked() and self._are_good()):
            await self._renew()
        return self._keys

    def _are_good(self) -> bool:
        until = self._keys.expires_at
        return until is None or until > self._now() + GOOD_FOR_S

    async def endpoint(self, service: str) -> Target:
        known = self._endpoints.get(service)
        if known is None:
            async with self._lock:
                url = await _in_thread(_endpoint_url, self.session, service)
            known = self._endpoints[service] = _target(url)
        return known

    async def _renew(self) -> None:
        """Renews the keys in one task. Other tasks wait for it only if the keys are not good."""
        async with self._lock:
            if trio.current_time() < self._check_at:
                return
            try:
                self._keys = await _in_thread(_freeze, self._source)
            except NoResponse as error:
                # A failed renewal is no outage while the present keys are valid.
                if not self._are_good():
                    raise
                log.warning("AWS credentials not refreshed", extra={"cause": str(error)})
            self._check_at = trio.current_time() + CHECK_EVERY_S


async def find_access(now: Callable[[], float], region: str | None = None) -> ResolvedAccess:
    """Resolves keys and region. `now` is the machine's wall clock. Raises NoResponse if there are
    no keys, or no region is set."""
    session, source = await _in_thread(_resolve, region)
    region = session.get_config_variable("region")
    if source is None or region is None:
        raise NoResponse("no AWS credentials or region could be found", was_sent=False)
    keys = await _in_thread(_freeze, source)
    return ResolvedAccess(session, region, source, keys, now, _check_at=trio.current_time())


async def _in_thread(function: Any, *args: Any) -> Any:
    """Runs a lookup of botocore in a thread. Its errors become NoResponse.

    A lookup that takes too long is abandoned: botocore cannot be cancelled.
    """
    try:
        with trio.fail_after(FOUND_WITHIN_S):
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
    except _CREDENTIAL_ERRORS as error:
        raise NoResponse(f"AWS configuration: {type(error).__name__}", was_sent=False) from error


def _resolve(region: str | None) -> tuple[Any, Any]:
    session = botocore.session.Session(session_vars=_REGION_VARIABLES)
    if region is not None:
        session.set_config_variable("region", region)
    return session, session.get_credentials()


def _freeze(source: Any) -> Credentials:
    keys = source.get_frozen_credentials()
    # Only renewable keys have an expiry, and botocore has no public name for it.
    until = getattr(source, "_expiry_time", None)
    expires_at = until.timestamp() if until is not None else None
    return Credentials(keys.access_key, keys.secret_key, keys.token, expires_at)


def _endpoint_url(session: Any, service: str) -> str:
    url: str = session.create_client(service).meta.endpoint_url
    return url


def _target(url: str) -> Target:
    target = parse_url(url)
    if isinstance(target, BadUrl):
        raise NoResponse(f"the endpoint's URL cannot be used: {target.detail}", was_sent=False)
    return target
