"""Recorded training steps of small models, for tests of what the runtime does and when."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_WARM_UP_STEPS = 3  # the order of units is known after the first one
BATCH = 4
EQUAL = (8, 8, 8, 8, 8)
UNEVEN = (8, 40, 5, 24, 8)


class Layer(nn.Module):
    """Two linear layers; one unit."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, 2 * outputs)
        self.down = nn.Linear(2 * outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class Chain(nn.Module):
    """Layers called one after the other; the head belongs to the root's unit."""

    checkpointed = False

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(*pair) for pair in itertools.pairwise(widths)])
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class Pause(torch.autograd.Function):
    """The identity; computes for a while in both directions, leaving the processor to others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SlowLayer(Layer):
    """A layer that takes much longer than its communication."""

    seconds = 0.02

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return torch.tanh(self.down(Pause.apply(hidden, self.seconds)))


def plain(widths: tuple[int, ...]) -> Chain:
    return Chain(widths)


def slow(widths: tuple[int, ...]) -> Chain:
    """All layers pause in the middle of their forward and backward."""
    model = Chain(widths)
    for layer in model.layers:
        layer.__class__ = SlowLayer
    return model


def checkpointed(widths: tuple[int, ...]) -> Chain:
    """Each layer's activations are computed again in backward."""
    model = Chain(widths)
    model.checkpointed = True
    return model


def first_frozen(widths: tuple[int, ...]) -> Chain:
    """Backward stops before the first layer, so it never reads its weights."""
    model = Chain(widths)
    model.layers[0].requires_grad_(False)
    return model


def second_frozen(widths: tuple[int, ...]) -> Chain:
    """Backward passes through the second layer's weights, which have no gradients."""
    model = Chain(widths)
    model.layers[1].requires_grad_(False)
    return model


def half_frozen(widths: tuple[int, ...]) -> Chain:
    """The first half of the second layer is frozen."""
    model = Chain(widths)
    model.layers[1].up.requires_grad_(False)
    return model


class Lookup(nn.Module):
    """An embedding of which row numbers are looked up; backward never reads its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(BATCH, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(BATCH))


def with_embedding(widths: tuple[int, ...]) -> Chain:
    """The first layer is an embedding."""
    model = Chain(widths)
    assert widths[0] == widths[1]
    model.layers[0] = Lookup(widths[0])
    return model


MakeChain = Callable[[tuple[int, ...]], Chain]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to record.

    Attributes:
        make: makes the model from its widths.
        widths: of the layers' inputs and the last one's outputs.
        prefetch: units gathered ahead.
        param_dtype: for computation and gathers, if not fp32.
        comm: kind of communicator.
        reshard_root: `reshard_after_forward` of the root unit.
        twice: whether the loss contains the gradient of the loss: a double backward.
        gather_seconds: added to every all-gather.
    """

    make: MakeChain = plain
    widths: tuple[int, ...] = UNEVEN
    prefetch: int = 1
    param_dtype: torch.dtype | None = None
    comm: str = "auto"
    reshard_root: bool | None = None
    twice: bool = False
    gather_seconds: float = 0.0


@dataclass(frozen=True)
class Recorded:
    """One recorded step of one rank.

    Attributes:
        records: `fsdpx.timeline.Record`s in order of their begin.
        root: name of the root unit.
        layers: names of the other units in the order of their forwards.
        num_elements: parameters' elements by unit; `trainable` counts those that train.
        gathered_bytes: by unit, as the layout has it.
        still_gathered: units that hold full parameters after the step.
        arena_bytes: of all arenas.
    """

    records: list[Any]
    root: str
    layers: list[str]
    num_elements: dict[str, int]
    trainable: dict[str, int]
    num_parameters: dict[str, int]
    gathered_bytes: dict[str, int]
    still_gathered: list[str]
    arena_bytes: int

    def of(self, unit: str, operation: str) -> list[Any]:
        """The records of one unit and operation in order of their begin."""
        return [r for r in self.records if (r.unit, r.operation) == (unit, operation)]

    def issues(self, unit: str, operation: str) -> list[int]:
        """When a unit's collectives were issued, in order."""
        return sorted(r.issue_ns for r in self.of(unit, operation))


def shard(model: Chain, setup: Setup) -> Any:
    """Wraps the layers and then the model."""
    from fsdpx import MixedPrecisionPolicy, fully_shard

    options = {
        "prefetch": setup.prefetch,
        "comm": setup.comm,
        "mp_policy": MixedPrecisionPolicy(param_dtype=setup.param_dtype),
    }
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, reshard_after_forward=setup.reshard_root, **options)


def loss_of(model: nn.Module, x: Tensor, *, twice: bool) -> Tensor:
    """A loss; `twice` adds the squared gradient of it by the inputs."""
    if not twice:
        return model(x).float().square().mean()
    x = x.requires_grad_()
    loss = model(x).float().square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@contextlib.contextmanager
def slow_gathers(seconds: float) -> Iterator[None]:
    """Lets the communication stream sleep before every all-gather."""
    from fsdpx.unit import Unit

    start_gather = Unit.start_gather

    def delayed(unit: Unit, place: Any) -> None:
        unit.comm.stream.enqueue(lambda: time.sleep(seconds))
        start_gather(unit, place)

    Unit.start_gather = delayed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Unit.start_gather = start_gather  # type: ignore[method-assign]


def record_step(rank: int, world_size: int, setup: Setup) -> Recorded:
    """Trains for a few steps and records the next one."""
    import fsdpx
    from fsdpx.unit import units

    torch.manual_seed(0)
    plain_model = setup.make(setup.widths)
    model = shard(plain_model, setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        x = torch.randn(BATCH, setup.widths[0])
        loss_of(model, x, twice=setup.twice).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(rank)
    for _ in range(NUM_WARM_UP_STEPS):
        step()
    delay = slow_gathers(setup.gather_seconds) if setup.gather_seconds else contextlib.nullcontext()
    with delay, fsdpx.record_timeline(model) as timeline:
        step()
    found = units(model)
    description = fsdpx.describe(model)
    parameters = {u.name: list(u.modules[0].parameters()) for u in found}
    root = found[0].name
    inner = {id(p) for unit in found[1:] for p in parameters[unit.name]}
    parameters[root] = [p for p in parameters[root] if id(p) not in inner]
    return Recorded(
        records=timeline.records,
        root=root,
        layers=[u.name for u in found[1:]],
        num_elements={n: sum(p.numel() for p in ps) for n, ps in parameters.items()},
        trainable={
            n: sum(p.numel() for p in ps if p.requires_grad) for n, ps in parameters.items()
        },
        num_parameters={n: len(ps) for n, ps in parameters.items()},
        gathered_bytes={u.name: u.gathered_bytes for u in description.units},
        still_gathered=[u.name for u in found if u.is_gathered],
        arena_bytes=description.memory.arenas,
    )
