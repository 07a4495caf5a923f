"""Access to the dashboard: roles, the session cookie and CSRF tokens (docs/dashboard.md, Sign-in).

The cookie contains the key that was typed, sealed. The role is derived from the key on every
request, so that a key that is revoked ends its sessions. A visitor without a key has a cookie too:
its nonce binds the token of the sign-in form to this browser.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from conveyor.api.server.auth import Authenticator, Principal, read_key
from conveyor.domain.errors import ConveyorError, Unauthenticated
from conveyor.domain.ids import CallerId
from conveyor.ports.secret_box import CannotUnseal, SecretBox
from conveyor.usecases.context import Context

COOKIE = "conveyor_session"
# A working day: a forgotten browser is signed out by the next morning.
SESSION_S = 12 * 3600
# The default key of `conveyor jobs`. Without sign-in, new jobs belong to its caller.
DEV_KEY = "dev"

_PLACE = "dashboard session"
_PURPOSE = "dashboard form"
# Headers that a proxy adds. A request that passed one does not come from this machine.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_NONCE_BITS = 128


class Role(StrEnum):
    CALLER = "caller"  #: Sees and changes the jobs of one API key.
    OPERATOR = "operator"  #: Sees the jobs of all callers, and may stop and change them.


class Forbidden(ConveyorError):
    """The role of this session may not do this, or the form was not sent by our own page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The keys of operators, and whether visitors from this machine need no key."""

    admin_key: str | None = None
    viewer_key: str | None = None
    is_open_on_loopback: bool = False


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the cookie."""

    nonce: str
    until: float
    key: str | None = None
    is_read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The visitor who is signed in. `principal` is None for an operator with an operator's key."""

    role: Role
    principal: Principal | None
    is_read_only: bool
    is_signed_in: bool = True

    @property
    def is_operator(self) -> bool:
        return self.role is Role.OPERATOR

    @property
    def name(self) -> CallerId:
        """The name under which quotas count this visitor."""
        return CallerId("operator") if self.principal is None else self.principal.caller

    def require_change(self) -> None:
        if self.is_read_only:
            raise Forbidden("This session is read-only.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a request says about its sender. `host` is the Host header, in lower case."""

    cookie: str | None
    peer: str | None
    host: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gatekeeper:
    """Decides who a visitor is."""

    env: Context
    auth: Authenticator
    rules: AccessRules

    @property
    def _box(self) -> SecretBox:
        return self.env.secret_box

    def new_session(self, *, key: str | None = None, is_read_only: bool = False) -> Session:
        """A session with a new nonce: signing in never continues an earlier session."""
        return Session(
            nonce=f"{self.env.random.getrandbits(_NONCE_BITS):032x}",
            until=self.env.now() + SESSION_S,
            key=key,
            is_read_only=is_read_only,
        )

    def seal(self, session: Session) -> str:
        return self._box.seal(msgspec.json.encode(session), place=_PLACE)

    def open_session(self, cookie: str | None) -> Session | None:
        """The session of a cookie that this server made and that has not expired."""
        if cookie is None:
            return None
        try:
            session = msgspec.json.decode(self._box.unseal(cookie, place=_PLACE), type=Session)
        except (CannotUnseal, msgspec.DecodeError):
            return None
        return session if session.until > self.env.now() else None

    def identify(self, session: Session, arrival: Arrival) -> Viewer | None:
        """Returns the visitor, or None if it has to sign in."""
        if session.key is not None:
            try:
                return self.viewer_of(session.key, is_read_only=session.is_read_only)
            except Unauthenticated:
                return None
        if self.rules.is_open_on_loopback and _is_local(arrival):
            return Viewer(
                role=Role.OPERATOR,
                principal=self.auth.identify(DEV_KEY),
                is_read_only=False,
                is_signed_in=False,
            )
        return None

    def viewer_of(self, key: str, *, is_read_only: bool) -> Viewer:
        """Returns the visitor with this key. Raises Unauthenticated."""
        key = read_key([key])
        if _is_same(key, self.rules.admin_key):
            return Viewer(role=Role.OPERATOR, principal=None, is_read_only=is_read_only)
        if _is_same(key, self.rules.viewer_key):
            return Viewer(role=Role.OPERATOR, principal=None, is_read_only=True)
        principal = self.auth.identify(key)
        return Viewer(role=Role.CALLER, principal=principal, is_read_only=is_read_only)

    def form_token(self, session: Session) -> str:
        return self._box.sign(session.nonce, purpose=_PURPOSE)

    def check_form(self, session: Session, arrival: Arrival, token: str) -> None:
        """Raises Forbidden for a form that another site made the browser send."""
        site = arrival.headers.get("sec-fetch-site", "same-origin")
        expected = self.form_token(session)
        if site != "same-origin" or not hmac.compare_digest(token.encode(), expected.encode()):
            raise Forbidden("The form has expired. Open the page again and repeat.")


def _is_same(secret: str, known: str | None) -> bool:
    return known is not None and hmac.compare_digest(secret.encode(), known.encode())


def _is_local(arrival: Arrival) -> bool:
    """Whether a browser on this machine asked for an address of this machine.

    The Host header is checked because a foreign site can make its own name resolve to 127.0.0.1.
    """
    if any(name in arrival.headers for name in _FORWARDED):
        return False
    name = arrival.host.rpartition(":")[0] if _has_port(arrival.host) else arrival.host
    is_own_name = name == "localhost" or _is_loopback(name.strip("[]"))
    return is_own_name and arrival.peer is not None and _is_loopback(arrival.peer)


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit() and not host.endswith("]")


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
