"""Every kind of parameter and of module around it, trained beside the unsharded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fsdpx import ShardedTensor, fully_shard
from fsdpx.unit import unit_of


class Strided(nn.Module):
    """Weights that are not contiguous, or part of something larger."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.weight = nn.Parameter(torch.randn(6, 6).t())
        self.conv = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
        self.part = nn.Parameter(torch.randn(100)[10:16])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.part
        return self.conv(x.view(-1, 2, 3, 1).expand(-1, -1, -1, 2)).flatten(1)


class Dtypes(nn.Module):
    """Trained in two dtypes, beside data of every other kind."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Linear(6, 6)
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
        integers = torch.arange(9) * (1 << 40) - 5
        self.data = nn.ParameterDict(
            {
                "int8": nn.Parameter(torch.arange(-9, 12).to(torch.int8).view(7, 3), False),
                "uint8": nn.Parameter(torch.arange(5).to(torch.uint8), False),
                "int64": nn.Parameter(integers, False),
                "bool": nn.Parameter(torch.tensor([True, False, True]), False),
                "fp8": nn.Parameter(torch.randn(9).to(torch.float8_e4m3fn), False),
                "bf16": nn.Parameter(torch.randn(3).bfloat16(), False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        offsets = sum(value.double().sum() for value in self.data.values())
        return self.full(x) * self.wide.float() + offsets.sin().float()


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(6) for _ in range(3)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(6))})
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.list:
            x = torch.tanh(x * parameter)
        return x * self.scale + self.dict["a"] + self.none.sum()


class Tricks(nn.Module):
    """Slots, properties and attributes of its own making."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.linear = nn.Linear(6, 6)
        self._hidden = nn.Parameter(torch.randn(6, 6))

    @property
    def hidden(self) -> Tensor:
        return self._hidden * self.factor

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        return self.linear.weight if name == "magic" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.magic), self.hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.a.bias = self.b.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "strided": Strided,
    "dtypes": Dtypes,
    "containers": Containers,
    "tricks": Tricks,
    "tied": Tied,
    "no elements": lambda: nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 6)),
    "fewer elements than ranks": lambda: nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 1)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "parametrized weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True),
    "gru": lambda: nn.Sequential(nn.GRU(6, 5, batch_first=True), _First()),
}


class _First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def _trains(rank: int, size: int, kind: str, granularity: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(KINDS[kind]()))
    model, reference = models
    frozen = {n: p.detach().clone() for n, p in reference.named_parameters() if not p.requires_grad}
    fully_shard(model[0], granularity=granularity)
    fully_shard(model, granularity=granularity)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    for step in range(3):
        inputs = torch.randn(size * 4, 3, 6, generator=torch.Generator().manual_seed(step))
        model(inputs[rank * 4 :][:4]).square().mean().backward()
        reference(inputs).square().mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in models]
        assert torch.allclose(*norms, rtol=1e-5), (norms, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = [name for name, _ in reference.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(mine) is ShardedTensor
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        whole = mine.full_tensor()
        if name in frozen:
            assert torch.equal(whole.view(torch.uint8), frozen[name].view(torch.uint8)), name
        else:
            assert torch.allclose(whole, theirs, rtol=1e-4, atol=1e-5), name


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("granularity", ["element", "parameter"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_the_unsharded_model(kind: str, granularity: str) -> None:
    run_ranks(2, _trains, kind, granularity)


def test_full_parameters_are_contiguous() -> None:
    """Whatever the strides were: the gathered unit is one flat memory in the order of elements."""

    class Looks(Strided):
        def forward(self, x: Tensor) -> Tensor:
            assert all(p.is_contiguous() for p in (self.linear.weight, self.conv.weight, self.part))
            return super().forward(x)

    model = fully_shard(Looks())
    model(torch.randn(4, 6)).sum().backward()
    assert model.linear.weight.stride() == (6, 1)


def test_frozen_parameters_have_no_gradient_memory() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 2, False), nn.Linear(2, 64, False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = fully_shard(Adapted())
    model(torch.randn(2, 64)).sum().backward()
    unit = unit_of(model)
    buffers = unit.listener.gradients[unit].buffers.values()
    assert sum(buffer.flat.numel() for buffer in buffers) == 2 * 64 * 2
    assert model.base.weight.grad is None


# ---- refused at wrap time


class Other(torch.Tensor):
    """A tensor subclass that computes in its own way."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return torch.Tensor._make_subclass(cls, torch.ones(2))


def _with(parameter: nn.Parameter) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_parameter("p", parameter)
    return module


def _partly_meta() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    return module


def _over_the_same_memory() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight.data = module[0].weight.data
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (
        lambda: _with(nn.Parameter(torch.ones(2, dtype=torch.complex64))),
        "'p' is complex",
    ),
    "sparse": (lambda: _with(nn.Parameter(torch.eye(2).to_sparse())), "'p' has layout"),
    "lazy": (lambda: nn.LazyLinear(3), "'weight' is not initialised"),
    "subclass": (
        lambda: _with(nn.Parameter(torch.Tensor._make_subclass(Other, torch.ones(2)))),
        "'p' is a Other, a tensor that computes in its own way",
    ),
    "same memory": (
        _over_the_same_memory,
        r"'0.weight' and '1.weight' are different objects over the same memory",
    ),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
        "'0.weight' belongs to a TorchScript module",
    ),
    "partly on meta": (_partly_meta, "'weight' is on the meta device, though others"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name_when_wrapping(what: str) -> None:
    make, message = REFUSED[what]
    module = make()
    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match=message):
        fully_shard(module)
    assert all(p is before[name] for name, p in module.named_parameters())
    assert not hasattr(type(module), "reshard")


def _dtensor(rank: int, size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    module = _with(nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()])))
    with pytest.raises(ValueError, match="'p' is a DTensor") as caught:
        fully_shard(module)
    return str(caught.value)


def test_dtensors_are_refused_by_name() -> None:
    assert all("ignored_params" in message for message in run_ranks(2, _dtensor))


# ---- ties


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_ties_across_units_name_both(what: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    setattr(model[1][0], what, getattr(model[0], what))
    fully_shard(model[0])
    message = rf"'0.{what}' is shared with '{what}', which is already in the unit of Linear"
    with pytest.raises(ValueError, match=message):
        fully_shard(model[1])
