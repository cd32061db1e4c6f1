"""Faults that users of sharded data parallelism have reported in public must not happen here."""

from __future__ import annotations

import pytest
from conformance.registry import CASES
from conformance.themes import run_case
from ranks import run_ranks

NUM_CASES = 98


def test_number_of_cases() -> None:
    assert len(CASES) == NUM_CASES


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    wanted = CASES[name]
    outcomes = run_ranks(wanted.world_size, run_case, name, timeout=60)
    # A refusal is one on every rank: a rank that goes on alone would wait for the others.
    assert len({outcome is None for outcome in outcomes}) == 1, outcomes
