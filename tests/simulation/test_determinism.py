"""Tests that a seed gives the same trace in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conveyor.simulation.options import ALL_ENGINES, draw
from conveyor.simulation.simulator import simulate


def hash_in_a_process(seed: int, engine: str, hash_seed: str) -> str:
    code = (
        "from conveyor.simulation.suite import run_seed\n"
        f"print(run_seed({seed}, engine={engine!r}).hash)"
    )
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_seed_makes_the_same_trace_in_any_process(engine: str) -> None:
    here = simulate(draw(5, engine=engine)).hash

    assert hash_in_a_process(5, engine, "1") == here
    assert hash_in_a_process(5, engine, "2") == here


def test_different_seeds_draw_different_fault_rates() -> None:
    assert len({repr(draw(seed).rates) for seed in range(20)}) == 20
