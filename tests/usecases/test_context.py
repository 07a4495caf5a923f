"""Optimistic retry: attempts until one has an answer, and not for ever."""

from __future__ import annotations

import pytest

from conveyor.domain.errors import Conflict
from conveyor.usecases.context import AGAIN, ATTEMPTS_MAX, Again, retry, retry_or_refuse


class Attempts:
    """Has an answer at the attempt of this number; an answer may be None."""

    def __init__(self, answers_at: int) -> None:
        self.answers_at = answers_at
        self.count = 0

    async def __call__(self) -> Again | None:
        self.count += 1
        return None if self.count == self.answers_at else AGAIN


async def test_an_attempt_is_repeated_until_it_has_an_answer() -> None:
    attempts = Attempts(answers_at=3)

    await retry_or_refuse("The run is", attempts)

    assert attempts.count == 3


async def test_the_last_attempt_may_have_the_answer() -> None:
    assert await retry(Attempts(answers_at=ATTEMPTS_MAX)) is None


async def test_attempts_are_bounded() -> None:
    attempts = Attempts(answers_at=0)

    assert await retry(attempts) is AGAIN
    assert attempts.count == ATTEMPTS_MAX


async def test_a_caller_whose_attempts_all_failed_is_refused_and_may_try_again() -> None:
    with pytest.raises(Conflict) as refused:
        await retry_or_refuse("The run is", Attempts(answers_at=0))

    assert str(refused.value) == "The run is changing too fast; try again."
    assert refused.value.retry_after_s == 1
