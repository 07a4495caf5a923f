"""Every engine gives the same answers as the memory engine on random histories of a worker."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import ManualClock
from tests.conformance.engines import ENGINES, fresh_engine
from tests.conformance.random_history import VERBS, WEIGHTED, Step, Walker

STEP_COUNT = 40
VERDICTS = ("Applied", "Stale", "Missing")

step_strategy = st.builds(Step, st.sampled_from(WEIGHTED), st.integers(0, 7), st.integers(0, 4))
FREQUENT_ANSWERS = [
    *(f"{verb} {kind}" for verb in ("ingest", "settle", "admit_inline") for kind in VERDICTS),
    *(f"{verb} {kind}" for verb in ("claim", "take_over") for kind in ("Applied", "Stale")),
    "receive tuple",
    "extend int",
    "renew int",
    "read_row Task",
    "find_rows ShardCounters",
]
OPENING_STEPS = [Step("admit", 0, 1), Step("ingest", 0, 3), Step("receive", 0, 2)]


# These engines count a task in the change that inserts it. Their chunks must not contain a task
# that another change inserted; real lists do not either, because task ids come from the list.
COUNT_ROWS = frozenset({"mixed", "mixed-modelled"})


async def _walk(
    name: str, steps: list[Step], *, seed: int, rows_overlap: bool = True
) -> list[tuple[Step | None, object]]:
    """Returns the answer to every step, and at the end everything that can be read."""
    clock = ManualClock()
    async with fresh_engine(name, clock, seed=seed) as engine:
        walker = Walker(engine, clock, rows_overlap)
        answers: list[tuple[Step | None, object]] = []
        for step in [*OPENING_STEPS, *steps]:
            answers.append((step, await walker.take(step)))  # noqa: PERF401 (a list cannot await)
        return [*answers, (None, await walker.dump())]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENGINES.keys() - {"aws", "mixed"}))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step_strategy, min_size=STEP_COUNT, max_size=STEP_COUNT))
async def test_an_engine_agrees_with_memory(name: str, steps: list[Step]) -> None:
    await _agree(name, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aws", "mixed"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step_strategy, min_size=STEP_COUNT, max_size=STEP_COUNT))
async def test_an_engine_on_a_server_agrees_with_memory(name: str, steps: list[Step]) -> None:
    await _agree(name, steps)


async def _agree(name: str, steps: list[Step]) -> None:
    rows_overlap = name not in COUNT_ROWS
    expected = await _walk("memory", steps, seed=1, rows_overlap=rows_overlap)
    answers = await _walk(name, steps, seed=2, rows_overlap=rows_overlap)

    for ours, theirs in zip(expected, answers, strict=True):
        assert theirs == ours


async def test_random_histories_produce_each_kind_of_answer_often() -> None:
    """Without this, the comparison of engines could pass although hardly any step has an effect."""
    random = Random(5)
    seen: dict[str, int] = {}

    for _ in range(60):
        steps = [
            Step(random.choice(WEIGHTED), random.randrange(8), random.randrange(5))
            for _ in range(STEP_COUNT)
        ]
        for step, answer in await _walk("memory", steps, seed=1):
            for part in answer if isinstance(answer, list) else [answer]:
                answers = f"{step.verb if step else 'dump'} {type(part).__name__}"
                seen[answers] = seen.get(answers, 0) + 1

    for answers in FREQUENT_ANSWERS:
        assert seen.get(answers, 0) > 2, (answers, seen)
    assert {answers.split()[0] for answers in seen} == {*VERBS, "dump"}
