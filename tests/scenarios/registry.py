"""The list of scenarios: how to make the model, what to run on it, and what must come of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

# What a scenario may return: tensors that must equal those of the unsharded run.
Results = Sequence[Tensor] | None
MakeModel = Callable[[], nn.Module]
Run = Callable[[nn.Module], Results]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training run.

    Attributes:
        name: what the test is called.
        make_model: returns the model, initialised from torch's global generator.
        run: uses the model; draws its inputs from torch's global generator.
        raises: a pattern; the sharded run must raise a RuntimeError that matches it.
        forward_only: no backward pass ends the run, so that a root which keeps its parameters
            until then may still hold them.
        compiles: uses torch.compile, whose caches are emptied before the run.
    """

    name: str
    make_model: MakeModel
    run: Run
    raises: str | None = None
    forward_only: bool = False
    compiles: bool = False


SCENARIOS: dict[str, Scenario] = {}


def add_scenario(
    name: str,
    make_model: MakeModel,
    run: Run,
    *,
    raises: str | None = None,
    forward_only: bool = False,
    compiles: bool = False,
) -> None:
    """Puts a scenario on the list; a name may be used once."""
    if name in SCENARIOS:
        raise AssertionError(f"two scenarios are called {name!r}")
    SCENARIOS[name] = Scenario(
        name=name,
        make_model=make_model,
        run=run,
        raises=raises,
        forward_only=forward_only,
        compiles=compiles,
    )


def scenario(
    make_model: MakeModel,
    *,
    raises: str | None = None,
    forward_only: bool = False,
    compiles: bool = False,
) -> Callable[[Run], Run]:
    """Puts the decorated function on the list under its own name."""

    def register(run: Run) -> Run:
        add_scenario(
            run.__name__,
            make_model,
            run,
            raises=raises,
            forward_only=forward_only,
            compiles=compiles,
        )
        return run

    return register
