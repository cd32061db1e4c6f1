"""Every way in which backward can reach a unit's weights, on real units, alone and on two ranks."""

import pytest
from ranks import run_ranks
from scenarios.driver import run_scenario
from scenarios.registry import SCENARIOS

NUM_SCENARIOS = 71


def test_number_of_scenarios() -> None:
    assert len(SCENARIOS) == NUM_SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_scenario(world_size: int, name: str) -> None:
    problems = run_ranks(world_size, run_scenario, name, timeout=60)
    assert problems == [[]] * world_size
