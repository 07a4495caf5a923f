"""Results: pages and filters of tasks, figures per host, downloads of bodies, links to them, and
their expiry (docs/api.md, Results)."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf

import msgspec

from conveyor.domain import limits, queries
from conveyor.domain.changes import RunKey
from conveyor.domain.errors import (
    InvalidArgument,
    NotFound,
    ResultDamaged,
    ResultExpired,
    TaskNotReady,
)
from conveyor.domain.ids import CallerId, JobId, RunId, TaskId
from conveyor.domain.lifecycle import TASK_TERMINAL, TASK_UNFINISHED
from conveyor.domain.model import FailureReason, Job, Result, Run, Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.domain.submit.target import host_of
from conveyor.ports.errors import BlobMissing, StorageDamaged
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_task, totals_of, visible_run


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that are checked row by row, and the order of the result. `text` is in lower
    case and part of the URL."""

    reason: FailureReason | None = None
    host: str | None = None
    text: str | None = None
    in_list_order: bool = False

    @property
    def is_empty(self) -> bool:
        return self == TaskFilter()

    @property
    def scope(self) -> str:
        """A text that is the same for equal filters, in every process."""
        return f"{self.reason}|{self.host}|{self.text}|{self.in_list_order}"

    def matches(self, task: Task) -> bool:
        return (
            self.reason in {None, task.reason}
            and (self.text is None or self.text in task.url.lower())
            and (self.host is None or self.host == host_of(task.url))
        )


async def find_tasks(
    env: Context, query: TasksOf, task_filter: TaskFilter
) -> tuple[list[Task], TaskId | None]:
    """Returns up to `limit` tasks in id order, and the id after which the next page starts.

    A page ends after about ROWS_READ_MAX rows, however rare the matching tasks are.
    """
    tasks: list[Task] = []
    position, left = query.after, env.config.rows_read_max
    while left > 0:
        page = msgspec.structs.replace(query, after=position, limit=limits.PAGE_ROWS_MAX)
        rows = await env.store.page_tasks(page, read_max=left)
        for task in rows.tasks:
            if task_filter.matches(task):
                tasks.append(task)
                if len(tasks) == query.limit:
                    return tasks, task.task_id
        position = rows.until
        if position is None:
            return tasks, None
        # A page that is not full has read as many rows as it might.
        is_full = len(rows.tasks) == page.limit
        left = left - len(rows.tasks) if is_full else 0
    return tasks, position


async def find_in_list_order(
    env: Context, query: TasksOf, task_filter: TaskFilter, *, after: int
) -> tuple[list[Task], int | None]:
    """Returns up to `limit` tasks in the order of the list, skipping `after` of them.

    Rows are ordered by id, so this reads the whole run. Raises InvalidArgument for a long run.
    """
    matching = [task async for task in _walk(env, query) if task_filter.matches(task)]
    matching.sort(key=lambda task: (task.batch_id, task.index))
    until = after + query.limit
    return matching[after:until], until if until < len(matching) else None


async def _walk(env: Context, query: TasksOf) -> AsyncIterator[Task]:
    position: TaskId | None = None
    count = 0
    while True:
        page = msgspec.structs.replace(query, after=position, limit=limits.PAGE_ROWS_MAX)
        rows = await env.store.page_tasks(page, read_max=env.config.rows_read_max)
        for task in rows.tasks:
            yield task
        count += len(rows.tasks)
        position = rows.until
        if position is None:
            return
        if count > limits.ORDERED_ROWS_MAX:
            raise InvalidArgument(
                f"Only a list of up to {limits.ORDERED_ROWS_MAX:,} tasks can be read in its order.",
                pointer="/order",
            )


@dataclass(slots=True)
class HostFigures:
    """The tasks of one host. `seconds` are the durations of their last attempts."""

    host: str
    total: int = 0
    successful: int = 0
    failed: int = 0
    inflight: int = 0
    bytes: int = 0
    credits: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, task: Task) -> None:
        self.total += 1
        self.successful += task.status is TaskStatus.SUCCESSFUL
        self.failed += task.status is TaskStatus.FAILED
        self.inflight += task.status is TaskStatus.PROCESSING
        self.credits += task.credits
        if task.result is not None:
            self.bytes += task.result.size_bytes
        if task.reason is not None:
            self.reasons[task.reason] += 1
        if task.status in TASK_TERMINAL and task.history:
            self.seconds.append(task.history[-1].ended_at - task.history[-1].started_at)

    @property
    def median_s(self) -> float | None:
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else None


async def sum_hosts(env: Context, query: TasksOf) -> tuple[list[HostFigures], bool]:
    """Sums the tasks of each host, those with the most failures first, from up to HOST_ROWS_MAX
    rows. The second value states whether these were all rows."""
    figures: dict[str, HostFigures] = {}
    position: TaskId | None = None
    count = 0
    while count < limits.HOST_ROWS_MAX:
        page = msgspec.structs.replace(query, after=position, limit=limits.PAGE_ROWS_MAX)
        rows = await env.store.page_tasks(page, read_max=env.config.rows_read_max)
        for task in rows.tasks:
            host = host_of(task.url) or ""
            figures.setdefault(host, HostFigures(host)).add(task)
        count += len(rows.tasks)
        position = rows.until
        if position is None:
            break
    by_failures = sorted(figures.values(), key=lambda host: (-host.failed, -host.total, host.host))
    return by_failures[: limits.HOSTS_SHOWN_MAX], position is None


# Expiry: results are kept for some time after the end of their run (SPEC.md 4.20).
#
# A result expires with the run that produced it, also where a rerun has inherited it. It expires
# earlier if its body is `body_days` old, because a bucket removes bodies by age, whatever their
# run.


_DAY_S = 86_400.0


class ResultExpiry(msgspec.Struct, frozen=True):
    """The instants at which the results of a run expire, by the run that produced them, evaluated
    at the time `at`. No body is older than `body_s`."""

    run_id: RunId
    instants: dict[RunId, float]
    body_s: float
    at: float

    def instant_of(self, task: Task) -> float:
        """Returns the instant at which the body of the task expires, if it has one."""
        with_its_run = self.instants.get(task.source_run_id or self.run_id, inf)
        return min(with_its_run, _stored_after(task) + self.body_s)

    def is_over(self, task: Task) -> bool:
        """Returns whether the task had a body that has expired."""
        return task.result is not None and self.instant_of(task) <= self.at


async def expiries_of(env: Context, run: Run) -> ResultExpiry:
    runs = [run]
    for source_run_id in run.source_run_ids:
        source = await env.store.read(RunKey(run.job_id, source_run_id))
        if source is not None:
            runs.append(source)
    instants = {
        source.run_id: source.expires_at for source in runs if source.expires_at is not None
    }
    return ResultExpiry(run.run_id, instants, _body_s(env), env.now())


def _stored_after(task: Task) -> float:
    """Returns the start of the attempt that fetched the body. The bucket counts from the later time
    of the upload, so it never removes a body before this module expects it. A rerun inherits the
    history with the result."""
    return task.history[-1].started_at if task.history else task.created_at


def _body_s(env: Context) -> float:
    return env.config.body_days * _DAY_S


def ttl_days(env: Context, days: int | None) -> int:
    """Returns for how many days the results of a job are kept. Raises InvalidArgument for more than
    `body_days`."""
    days_max = env.config.body_days
    if days is None:
        return min(limits.RESULT_TTL_DAYS, days_max)
    if days > days_max:
        raise InvalidArgument(
            f"This server keeps bodies for at most {days_max} days: result_ttl_days must be "
            f"from 1 to {days_max}.",
            pointer="/result_ttl_days",
        )
    return days


def run_instant(env: Context, run: Run) -> float | None:
    """Returns when the last own result of the run expires; None while the run is live."""
    if run.expires_at is None or run.ended_at is None:
        return run.expires_at
    return min(run.expires_at, run.ended_at + _body_s(env))


def refuse_expired(expiries: ResultExpiry, task: Task) -> None:
    if expiries.is_over(task):
        raise ResultExpired(f"The result was kept until {_iso_time(expiries.instant_of(task))}.")


def refuse_expired_run(env: Context, run: Run) -> None:
    instant = run_instant(env, run)
    if instant is not None and instant <= env.now():
        raise ResultExpired(f"The results of the run were kept until {_iso_time(instant)}.")


def _iso_time(instant: float) -> str:
    return datetime.fromtimestamp(int(instant), UTC).isoformat().replace("+00:00", "Z")


# Downloads of stored bodies: a missing or damaged body is never delivered as a whole one.
#
# A short body is read and checked before the response begins. A longer one is checked while it is
# sent, and its last piece is withheld until its digest is known: a client gets too few bytes
# instead of wrong ones.


# Bodies up to this size are read completely before the response begins, so that damage becomes an
# error response. Most pages are smaller. A larger limit costs memory and delay for each download.
CHECKED_BYTES_MAX = 1024 * 1024

_DAMAGED = "The stored bytes are not those that were fetched; run the task again."


async def whole_body(
    env: Context, key: str, *, size_bytes: int, sha256: str, absent: str
) -> AsyncGenerator[bytes, None]:
    """Returns the body, checked against its length and digest. Raises NotFound if there is none.
    Raises ResultDamaged, at once or at the end of the stream, if it differs."""
    body = await open_stream(env, key, absent=absent)
    pieces = _verify(body, size_bytes, sha256)
    if size_bytes > CHECKED_BYTES_MAX:
        return pieces
    return _single(b"".join([piece async for piece in pieces]))


async def part_of_body(
    env: Context, key: str, *, start: int, end: int, absent: str
) -> AsyncGenerator[bytes, None]:
    """Returns the bytes from `start` to before `end`. Raises ResultDamaged at the end if there are
    fewer."""
    return _cut(await open_stream(env, key, start=start, absent=absent), end - start)


async def open_stream(
    env: Context, key: str, *, start: int = 0, absent: str
) -> AsyncGenerator[bytes, None]:
    """Opens the body at byte `start` and reads its first piece. Raises NotFound if there is
    none."""
    pieces = env.blobs.open(key, start=start)
    try:
        # Before the response begins, so that a missing blob is a 404 instead of a broken response.
        first = await anext(pieces, b"")
    except BlobMissing:
        raise NotFound(absent) from None
    except StorageDamaged:
        raise ResultDamaged(_DAMAGED) from None
    return _with_first(first, pieces)


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    except StorageDamaged:
        raise ResultDamaged(_DAMAGED) from None
    finally:
        # Closes the engine's file or connection, also if the client disconnects in the middle.
        await rest.aclose()


async def _verify(
    pieces: AsyncGenerator[bytes, None], size_bytes: int, sha256: str
) -> AsyncGenerator[bytes, None]:
    digest, seen_bytes, held = hashlib.sha256(), 0, b""
    try:
        async for piece in pieces:
            digest.update(piece)
            seen_bytes += len(piece)
            if held:
                yield held
            held = piece
            # Too long is damaged already; do not read the rest.
            if seen_bytes > size_bytes:
                break
    finally:
        await pieces.aclose()
    if seen_bytes != size_bytes or digest.hexdigest() != sha256:
        raise ResultDamaged(_DAMAGED)
    yield held


async def _cut(pieces: AsyncGenerator[bytes, None], size_bytes: int) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece[:size_bytes]
            size_bytes -= len(piece)
            if size_bytes <= 0:
                return
    finally:
        await pieces.aclose()
    if size_bytes > 0:
        raise ResultDamaged(_DAMAGED)


async def _single(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


# Links: tokens that make one URL work without an API key, for a limited time (docs/api.md,
# Results).


LetsIn = Callable[[CallerId], bool]
"""Returns whether the key of a caller is accepted now: links end with the key of their caller."""


def let_all_in(caller: CallerId) -> bool:
    return True


def make_token(env: Context, what: str, *, purpose: str, until: float) -> str:
    return f"{int(until)}.{_signature(env, what, purpose, int(until))}"


def check_token(env: Context, token: str, what: str, *, purpose: str, absent: str) -> None:
    """Raises NotFound for any token that was not made for this purpose and object, and for an
    expired one."""
    text, _, signature = token.partition(".")
    # A bounded length, because the text comes from the client and `int` of a long text is slow.
    expires = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
    # Accept only the canonical spelling: with leading zeros one link would have many URLs.
    is_ours = text == str(expires)
    expected = _signature(env, what, purpose, expires)
    if not is_ours or not signature.isascii() or not hmac.compare_digest(expected, signature):
        raise NotFound(absent)
    # After the signature check, so that only a genuine link is reported as expired.
    if expires < env.now():
        raise NotFound("The link has expired; ask again for a new one.")


def _signature(env: Context, what: str, purpose: str, expires: int) -> str:
    return env.secret_box.sign(f"{what}/{expires}", purpose=purpose)


# Pages of tasks, and the body of one task.


FILTERS: dict[str, frozenset[TaskStatus] | None] = {
    "all": None,
    "successful": frozenset({TaskStatus.SUCCESSFUL}),
    "failed": frozenset({TaskStatus.FAILED}),
    "processing": TASK_UNFINISHED,
    "inflight": frozenset({TaskStatus.PROCESSING}),
}
EVERY_TASK = TaskFilter()


class ResultPage(msgspec.Struct, frozen=True):
    tasks: list[Task]
    next_cursor: str | None
    expiries: ResultExpiry


async def page(
    env: Context,
    job: Job,
    run: Run,
    *,
    status: str,
    cursor: str | None,
    limit: int,
    task_filter: TaskFilter = EVERY_TASK,
) -> ResultPage:
    """Returns one page of a run's tasks in id order; exact once the run has ended. It may be short
    if matching tasks are rare: only a missing cursor means that nothing is left."""
    if status not in FILTERS:
        raise InvalidArgument(f"status must be one of {', '.join(FILTERS)}.", pointer="/status")
    # The cursor's signature covers the scope, so a cursor works only for the list that issued it.
    scope = f"{job.caller}|{run.job_id}|{run.run_id}|{status}"
    if not task_filter.is_empty:
        return await _search(
            env, run, status, task_filter, cursor, limit, f"{scope}|{task_filter.scope}"
        )
    after = None if cursor is None else await _position(env, run, cursor, scope)
    if await _is_none(env, run, status):
        return ResultPage([], None, await expiries_of(env, run))
    query = TasksOf(
        job_id=run.job_id,
        run_id=run.run_id,
        shard_count=run.shard_count,
        statuses=FILTERS[status],
        after=after,
        # One row more than the page shows whether another page follows.
        limit=limit + 1,
    )
    task_page = await env.store.page_tasks(query, read_max=env.config.rows_read_max)
    rows = task_page.tasks[:limit]
    until = rows[-1].task_id if len(task_page.tasks) > limit else task_page.until
    following = None
    if until is not None:
        sign = partial(env.secret_box.sign, purpose="cursor")
        following = queries.make_cursor(until, scope=scope, sign=sign)
    return ResultPage(rows, following, await expiries_of(env, run))


async def _search(
    env: Context,
    run: Run,
    status: str,
    task_filter: TaskFilter,
    cursor: str | None,
    limit: int,
    scope: str,
) -> ResultPage:
    """A page of the tasks that match a filter, or of all tasks in the order of the list."""
    sign = partial(env.secret_box.sign, purpose="cursor")
    position_text = None if cursor is None else queries.read_cursor(cursor, scope=scope, sign=sign)
    statuses = FILTERS[status]
    if task_filter.reason is not None and statuses is None:
        statuses = FILTERS["failed"]  # No other task has a reason.
    query = TasksOf(
        job_id=run.job_id,
        run_id=run.run_id,
        shard_count=run.shard_count,
        statuses=statuses,
        limit=limit,
    )
    position: str | int | None
    if task_filter.in_list_order:
        rows, position = await find_in_list_order(
            env, query, task_filter, after=int(position_text or 0)
        )
    else:
        after = None if position_text is None else TaskId(position_text)
        query = msgspec.structs.replace(query, after=after)
        rows, position = await find_tasks(env, query, task_filter)
    following = None
    if position is not None:
        following = queries.make_cursor(str(position), scope=scope, sign=sign)
    return ResultPage(rows, following, await expiries_of(env, run))


async def _is_none(env: Context, run: Run, status: str) -> bool:
    """Returns whether the counters show no such task. Then the rows need not be read."""
    if FILTERS[status] is None:
        return False
    totals = await totals_of(env, run)
    unfinished = totals.admitted - totals.done
    counts = {"successful": totals.successful, "failed": totals.failed}
    return counts.get(status, unfinished) == 0


async def _position(env: Context, run: Run, cursor: str, scope: str) -> TaskId:
    """Reads a signed cursor, or the plain id of a task of this run, which older clients stored."""
    sign = partial(env.secret_box.sign, purpose="cursor")
    try:
        return TaskId(queries.read_cursor(cursor, scope=scope, sign=sign))
    except InvalidArgument:
        try:
            return (await load_task(env, run, cursor)).task_id
        except NotFound:
            pass
        raise


async def ended_task(env: Context, run: Run, task_id: str) -> tuple[Task, float]:
    """Returns the task, and the instant until which its body may be read. Raises TaskNotReady if it
    has not ended."""
    task = await load_task(env, run, task_id)
    if task.status not in TASK_TERMINAL:
        raise TaskNotReady("The task has not ended yet.")
    if task.result is None:
        return task, inf
    expiries = await expiries_of(env, run)
    refuse_expired(expiries, task)
    return task, expiries.instant_of(task)


async def body_of(env: Context, result: Result) -> AsyncGenerator[bytes, None]:
    """Opens the body, checked: before the response if it is short, at the end if it is long."""
    return await whole_body(
        env,
        result.key,
        size_bytes=result.size_bytes,
        sha256=result.sha256,
        absent="The body of this task is no longer stored.",
    )


def link_token(env: Context, run: Run, task: Task) -> str:
    """Makes the token with which the URL of a body works without an API key for
    RESULT_URL_TTL_S."""
    what = _link_subject(run.job_id, run.run_id, task.task_id)
    return make_token(env, what, purpose="result", until=env.now() + limits.RESULT_URL_TTL_S)


async def run_by_link(
    env: Context,
    job_id: str,
    run_id: str,
    task_id: str,
    token: str,
    *,
    lets_in: LetsIn = let_all_in,
) -> tuple[Job, Run]:
    """Returns the run of a signed link. Raises NotFound if the token is not valid or the caller's
    key is not accepted any more."""
    absent = "There is no such task."
    what = _link_subject(job_id, run_id, task_id)
    # Before any read: a request without a valid token costs no call to the store.
    check_token(env, token, what, purpose="result", absent=absent)
    job, run = await visible_run(env, JobId(job_id), RunId(run_id), absent=absent)
    if not lets_in(run.caller):
        raise NotFound(absent)
    return job, run


def _link_subject(job_id: str, run_id: str, task_id: str) -> str:
    return f"{job_id}/{run_id}/{task_id}"


def owner_scope(caller: CallerId, what: str) -> str:
    """Returns the scope of the cursors of a caller's own lists."""
    return f"{caller}|{what}"
