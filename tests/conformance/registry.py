"""The list of cases, and how one is run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Check = Callable[[int, int], None]

# Errors from the depths of the machinery are no clear refusals, whatever else they say.
NOT_A_REFUSAL = re.compile(
    r"storage of size 0|out of bounds for storage|Connection|mixed torch\.Tensor"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case.

    Attributes:
        name: what the test is called.
        check: called with rank and world size; asserts.
        world_size: number of ranks.
        refusal: if given, an error whose message matches it is right as well.
        report: the kind of public report, for whoever wonders why this is tested.
    """

    name: str
    check: Check
    world_size: int
    refusal: str | None
    report: str


CASES: dict[str, Case] = {}


def case(
    report: str, *, world_size: int = 2, refusal: str | None = None
) -> Callable[[Check], Check]:
    """Puts the decorated function on the list under its own name."""

    def register(check: Check) -> Check:
        name = check.__name__
        if name in CASES:
            raise AssertionError(f"two cases are called {name!r}")
        CASES[name] = Case(
            name=name, check=check, world_size=world_size, refusal=refusal, report=report
        )
        return check

    return register


def run_case(rank: int, world_size: int, name: str) -> str | None:
    """Runs one case on this rank.

    Returns:
        None, or the message with which the case was refused in a way that it allows.

    Raises:
        Exception: whatever the case raised otherwise.
    """
    wanted = CASES[name]
    try:
        wanted.check(rank, world_size)
    except AssertionError:
        raise
    except Exception as error:
        message = str(error)
        if wanted.refusal is None or NOT_A_REFUSAL.search(message):
            raise
        if not re.search(wanted.refusal, message):
            raise
        return message
    return None
