"""Runs a scenario sharded and unsharded, and says what differs."""

import re

import torch
from torch import Tensor, nn

from fsdpx import fully_shard
from fsdpx.unit import units

from . import checkpointing, custom_functions, exceptions, modules, paths, transforms
from .parts import whole
from .registry import SCENARIOS, Results, Scenario

# Importing a theme's file is what puts its scenarios on the list.
THEMES = (paths, checkpointing, custom_functions, modules, exceptions, transforms)

TOLERANCE = 1e-5


def shard_units(model: nn.Module) -> nn.Module:
    """Wraps every module that is marked as a unit, innermost first, and then the model."""
    for module in reversed(list(model.modules())):
        if module is not model and getattr(module, "is_unit", False):
            fully_shard(module)
    fully_shard(model)
    return model


def run_seeded(scenario: Scenario, model: nn.Module, rank: int) -> Results:
    """Runs the scenario with the inputs of a rank."""
    if scenario.compiles:
        torch._dynamo.reset()
    torch.manual_seed(100 + rank)
    return scenario.run(model)


def make_model(scenario: Scenario) -> nn.Module:
    """A new model with the same initial values each time (not every model can be copied)."""
    torch.manual_seed(1)
    return scenario.make_model()


def reference_run(
    scenario: Scenario, rank: int, world_size: int
) -> tuple[dict[str, Tensor | None], Results]:
    """The mean gradients by name over the ranks' inputs, and the results of this rank's run.

    Each rank's inputs meet a new model, because buffers are each rank's own.
    """
    grads: dict[str, list[Tensor]] = {}
    own_results: Results = None
    for each in range(world_size):
        replica = make_model(scenario)
        results = run_seeded(scenario, replica, each)
        if each == rank:
            own_results = results
        for name, parameter in replica.named_parameters():
            parts = grads.setdefault(name, [])
            if parameter.grad is not None:
                parts.append(parameter.grad)
    means = {
        name: torch.stack(parts).sum(0) / world_size if parts else None
        for name, parts in grads.items()
    }
    return means, own_results


def differs(actual: Tensor, expected: Tensor) -> bool:
    """Whether shapes differ, or values by more than the tolerance of the largest element."""
    if actual.shape != expected.shape:
        return True
    if not expected.numel():
        return False
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    # The negated comparison is true for NaN as well.
    return not (actual - expected).abs().max().item() <= limit


def compare_grads(model: nn.Module, expected: dict[str, Tensor | None]) -> list[str]:
    """The names of gradients that are missing, superfluous or wrong."""
    problems = []
    for name, parameter in model.named_parameters():
        grad = None if parameter.grad is None else whole(parameter.grad)
        wanted = expected[name]
        if grad is None or wanted is None:
            if grad is not None:
                problems.append(f"{name}: has a gradient, should have none")
            elif wanted is not None:
                problems.append(f"{name}: has no gradient")
        elif differs(grad, wanted):
            problems.append(f"{name}: wrong gradient")
    return problems


def compare_results(actual: Results, expected: Results) -> list[str]:
    """The numbers of the returned tensors that differ."""
    pairs = list(zip(actual or [], expected or [], strict=True))
    return [f"result {i} differs" for i, (a, b) in enumerate(pairs) if differs(a, b)]


def gathered_units(model: nn.Module, *, forward_only: bool) -> list[str]:
    """The names of the units that still hold full parameters."""
    if forward_only:
        model.reshard()  # a root keeps its own for the backward that usually follows
    return [f"unit {u.name!r} is still gathered" for u in units(model) if u.is_gathered]


def run_scenario(rank: int, world_size: int, name: str) -> list[str]:
    """Runs one scenario on this rank.

    Returns:
        What is wrong, one line each; empty if the sharded run equals the unsharded one.
    """
    scenario = SCENARIOS[name]
    expected_grads, expected_results = reference_run(scenario, rank, world_size)
    model = shard_units(make_model(scenario))
    identities = {n: id(p) for n, p in model.named_parameters()}
    problems = []
    if scenario.raises is None:
        results = run_seeded(scenario, model, rank)
        problems += compare_results(results, expected_results)
        problems += gathered_units(model, forward_only=scenario.forward_only)
        problems += compare_grads(model, expected_grads)
    else:
        problems += check_refusal(scenario, model, rank)
        problems += gathered_units(model, forward_only=scenario.forward_only)
    if identities != {n: id(p) for n, p in model.named_parameters()}:
        problems.append("parameters are other objects than before")
    return problems


def check_refusal(scenario: Scenario, model: nn.Module, rank: int) -> list[str]:
    """Runs a scenario that must raise."""
    assert scenario.raises is not None
    try:
        run_seeded(scenario, model, rank)
    except RuntimeError as error:
        if re.search(scenario.raises, str(error)):
            return []
        return [f"raised {error}, which does not match {scenario.raises!r}"]
    return ["raised nothing"]
