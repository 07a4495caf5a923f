"""Context: a change is committed with its events, ids are increasing, and retries are bounded."""

from __future__ import annotations

import pytest
import trio.testing

from conveyor.domain.changes import Applied, Stale
from conveyor.domain.errors import Conflict
from conveyor.domain.model import Event
from conveyor.usecases import event_log
from conveyor.usecases.context import (
    AGAIN,
    ATTEMPTS_MAX,
    Again,
    Context,
    InlineExecutor,
    retry,
    retry_or_refuse,
)
from tests.builders import CALLER, ManualClock, a_change, a_job, an_event, insert, kept


class Attempts:
    """Returns an answer at the attempt of this number, and repeats before; the answer may be
    None."""

    def __init__(self, answers_at: int) -> None:
        self.answers_at = answers_at
        self.count = 0

    async def __call__(self) -> Again | None:
        self.count += 1
        return None if self.count == self.answers_at else AGAIN


async def test_an_attempt_is_repeated_until_it_returns_an_answer() -> None:
    attempts = Attempts(answers_at=3)

    await retry_or_refuse("The run is", attempts)

    assert attempts.count == 3


async def test_the_last_attempt_may_return_the_answer() -> None:
    assert await retry(Attempts(answers_at=ATTEMPTS_MAX)) is None


async def test_the_number_of_attempts_is_bounded() -> None:
    attempts = Attempts(answers_at=0)

    assert await retry(attempts) is AGAIN
    assert attempts.count == ATTEMPTS_MAX


async def test_a_caller_whose_attempts_all_failed_gets_a_retryable_error() -> None:
    with pytest.raises(Conflict) as refused:
        await retry_or_refuse("The run is", Attempts(answers_at=0))

    assert str(refused.value) == "The run is changing too fast; try again."
    assert refused.value.retry_after_s == 1


async def events_of(env: Context) -> list[Event]:
    return await event_log.page(env.store, CALLER, after=0, limit=100)


async def test_events_are_numbered_when_their_change_is_applied(env: Context) -> None:
    woken = env.news.ticket(CALLER)
    change = a_change(insert(a_job()), insert(an_event(1)))

    assert isinstance(await env.commit_with_events(change), Applied)

    assert [event.seq for event in await events_of(env)] == [1]
    assert woken.is_set()


async def test_a_change_that_is_not_applied_reports_no_event(
    env: Context, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", event_log.__name__)
    await env.commit(a_change(insert(a_job())))
    change = a_change(insert(a_job()), insert(an_event(1)))

    assert isinstance(await env.commit_with_events(change), Stale)

    assert await events_of(env) == []
    assert caplog.records == []


async def test_a_change_with_events_is_not_committed_without_their_sequence_numbers(
    env: Context,
) -> None:
    event = an_event(1)

    with pytest.raises(AssertionError, match="commit_with_events"):
        await env.commit(a_change(insert(event)))

    assert await kept(env.store, event) is None


async def test_ids_increase_although_the_clock_is_set_back(
    env: Context, clock: ManualClock
) -> None:
    minted = [env.new_id()]
    clock.step(-3600)
    minted.append(env.new_id())

    assert minted == sorted(set(minted))


async def test_work_without_threads_still_has_a_checkpoint() -> None:
    with trio.testing.assert_checkpoints():
        assert await InlineExecutor().run(divmod, 7, 2) == (3, 1)
