"""Errors of the Postgres engine: why a database cannot be used, and the translation of the server's
errors to those of the ports (docs/engines.md, Postgres engine)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio
from psycopg.errors import Error, OperationalError

from conveyor.domain.errors import ConveyorError
from conveyor.ports.errors import StorageDamaged, StorageFull, Unavailable


class NotSetUp(ConveyorError):
    """The database has no schema of Conveyor, or an older one than this release needs."""


class BadDatabaseUrl(ConveyorError):
    """CONVEYOR_DATABASE_URL cannot be read. The message shows no part that may be secret."""

    def __init__(self, reason: str) -> None:
        # libpq quotes what it cannot read, which may be the password or the whole text.
        names_option = "query parameter" in reason
        super().__init__(
            f"CONVEYOR_DATABASE_URL cannot be read{f' ({reason})' if names_option else ''}. It has "
            "the form postgresql://user:password@host:port/database?sslmode=verify-full, and a "
            "character such as @ or % in a password is written as %40 or %25"
        )


DEADLOCK, SERIALIZATION = "40P01", "40001"
UNDEFINED_TABLE = "42P01"
UNIQUE_VIOLATION = "23505"

_FULL = "53100"
_SHUTDOWN = "57P01"
# Classes of SQLSTATE that name a state of the server, not a mistake of this program: connection,
# transaction rollback, resources, limits of a configuration, operator intervention, system errors.
_OUTAGES = ("08", "40", "53", "55", "57", "58")
# The server became a replica, or is not the primary.
_READ_ONLY = "25006"
# The server ended the transaction, because this process did not continue it.
_IDLE_TIMEOUTS = frozenset({"25P03", "25P04"})
_DAMAGED = ("XX001", "XX002")
# A wrong password, a missing database, missing rights.
_NO_RIGHT = ("42501", "3F000")
_ACCESS = ("28", "3D", *_NO_RIGHT)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the port's error for an error of the server. Bugs of this program stay unchanged."""
    try:
        yield
    except Error as error:
        translation = translate(error)
        if translation is None:
            raise
        raise translation from error
    except trio.TooSlowError as error:
        raise Unavailable("PostgreSQL did not answer in time") from error
    except (trio.ClosedResourceError, OSError) as error:
        raise Unavailable(f"PostgreSQL: {error}") from error


def translate(error: Error) -> Unavailable | None:
    """Returns the port's error, or None for a mistake of this program."""
    # Without the lines of the statement.
    state, text = error.sqlstate, f"PostgreSQL: {error.diag.message_primary or str(error).strip()}"
    if state is None:  # Not of the server: the connection was lost, or could not be made.
        return Unavailable(text)
    if state == _FULL:
        return StorageFull(text)
    if state in _DAMAGED:
        return StorageDamaged(text)
    if state.startswith(_ACCESS):
        what = "the user of CONVEYOR_DATABASE_URL needs the rights of docs/deploy.md, Postgres"
        refusal = Unavailable(f"{text}: {what}" if state in _NO_RIGHT else text)
        refusal.needs_operator = True
        refusal.code = state
        return refusal
    if state.startswith(_OUTAGES) or state == _READ_ONLY or state in _IDLE_TIMEOUTS:
        outage = Unavailable(text)
        outage.code = state
        return outage
    return None


def is_transient(error: Error) -> bool:
    """Whether the transaction was rolled back because of another one, and may be repeated."""
    return error.sqlstate in {DEADLOCK, SERIALIZATION}


def is_rolled_back(error: Error) -> bool:
    """Whether the server refused a statement, and with it the transaction.

    A FATAL error ends the connection instead. A pooler sends one too when it has lost its server,
    perhaps after the COMMIT, so it proves nothing.
    """
    return error.sqlstate is not None and error.diag.severity_nonlocalized == "ERROR"


def is_lost_connection(error: Unavailable) -> bool:
    """Whether the connection was lost, in contrast to an answer of the server."""
    cause = error.__cause__
    return isinstance(cause, OSError) or (
        isinstance(cause, OperationalError) and cause.sqlstate in {None, _SHUTDOWN}
    )
