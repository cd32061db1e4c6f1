"""Names, attributes, other methods than forward, hooks, copies, inputs and outputs of any kind."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdpx import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from .parts import (
    Pair,
    assert_close,
    assert_grads,
    assert_weights,
    backward_of_all_ranks,
    batch_of,
    check_one_step,
    grads_of,
    mean_square,
    reference_grads,
    shard_linears,
    small_mlp,
)
from .registry import case


class Encoder(nn.Module):
    """Has another method that uses its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x)


class CallsEncode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.encode(x)


@case(
    "a unit's other method, which is not registered",
    refusal=r"inner|linear\.weight|register_fsdp_forward_method",
)
def other_method_unregistered(rank: int, world_size: int) -> None:
    def shard(model: CallsEncode) -> None:
        fully_shard(model.inner)
        fully_shard(model)

    check_one_step(CallsEncode(), rank, world_size, shard=shard)


@case("a unit's other method, registered")
def other_method_registered(rank: int, world_size: int) -> None:
    def shard(model: CallsEncode) -> None:
        fully_shard(model.inner)
        register_fsdp_forward_method(model.inner, "encode")
        fully_shard(model)

    check_one_step(CallsEncode(), rank, world_size, shard=shard)


class ReadsBias(nn.Module):
    """Reads a parameter of its child outside of the child's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.child, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.child.bias)


@case("a child's bias, read by its parent: a piece of it was broadcast")
def bias_read_by_the_parent(rank: int, world_size: int) -> None:
    def shard(model: ReadsBias) -> None:
        fully_shard(model.child)
        fully_shard(model)

    model = ReadsBias()
    shard(model)
    with pytest.raises(RuntimeError, match=r"parameter 'child\.bias' \(6,\) is sharded"):
        model(batch_of(rank))


@case(
    "every linear layer of an encoder layer is a unit, though it reads one without calling it",
    refusal=r"weight|out_proj|linear",
)
def every_linear_of_an_encoder_layer(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = Pair(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0))
    x = torch.randn(2, 3, 8)
    for each in pair.both:
        mean_square(each, x).backward()
    pair.assert_grads()


@case("nn.LSTM keeps a list of its weights: two steps")
def lstm_two_steps(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = Pair(nn.LSTM(6, 5), fully_shard)
    pair.optimize(torch.optim.SGD, lr=1.0)
    x = torch.randn(3, 2, 6)
    for _ in range(2):
        for each in pair.both:
            each(x)[0].pow(2).sum().backward()
        pair.step()
    pair.assert_weights()


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    ids: Tensor


@dataclasses.dataclass
class Output:
    hidden: Tensor
    nothing: object
    ids: Tensor


class TakesDataclass(nn.Module):
    """Asserts that what is floating has been cast to bf16, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: Batch, *, extra: dict[str, list[Tensor]]) -> Output:
        assert batch.x.dtype == torch.bfloat16
        assert batch.ids.dtype == torch.int64
        assert extra["a"][0].dtype == torch.bfloat16
        return Output(self.linear(batch.x), None, batch.ids)


@case("dataclasses as inputs are not cast, as outputs not hooked")
def dataclass_in_and_out(rank: int, world_size: int) -> None:
    model = TakesDataclass()
    reference = copy.deepcopy(model)
    backward_of_all_ranks(reference, world_size, lambda m, x: mean_square(m.linear, x))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    batch = Batch(batch_of(rank), torch.arange(3))
    output = model(batch, extra={"a": [torch.ones(2)]})
    assert type(output) is Output
    assert batch.x.dtype == torch.float32
    assert output.ids.dtype == torch.int64
    output.hidden.float().pow(2).mean().backward()
    assert_grads(model, grads_of(reference), limit=2e-2)


class Named(NamedTuple):
    x: Tensor
    mask: Any
    flags: Tensor


class TakesNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: Named, *, extra: dict[str, list[Tensor]]) -> Named:
        assert [batch.x.dtype, batch.flags.dtype] == [torch.bfloat16, torch.bool]
        assert extra["a"][0].dtype == torch.bfloat16
        return Named(self.linear(batch.x), (None, {"flags": [batch.flags]}), batch.flags)


@case("named tuples are not cast or lose their type; the caller's list is edited")
def named_tuple_in_and_out(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(TakesNamed(), mp_policy=policy, reshard_after_forward=True)
    batch, given = Named(batch_of(rank), None, torch.tensor([True])), [torch.ones(2)]
    output = model(batch, extra={"a": given})
    assert type(output) is Named
    assert output.x.dtype == batch.x.dtype == given[0].dtype == torch.float32
    output.x.pow(2).mean().backward()
    reference = TakesNamed()
    backward_of_all_ranks(reference, world_size, lambda m, x: mean_square(m.linear, x))
    assert_grads(model, grads_of(reference), limit=2e-2)


class TwoHeads(nn.Module):
    """Two outputs, of which a loss uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@case("losses that use the outputs in turns, as in adversarial training")
def alternating_losses(rank: int, world_size: int) -> None:
    pair = Pair(TwoHeads())
    for step in range(4):

        def loss(each: nn.Module, x: Tensor, which: int = step % 2) -> Tensor:
            return each(x)[which].pow(2).mean()

        pair.zero_grad()
        pair.backward(rank, world_size, loss)
        pair.assert_grads()


@case("a moving average of the weights, kept in a second sharded model")
def ema_by_shards(rank: int, world_size: int) -> None:
    model, average = small_mlp(), small_mlp()
    reference, reference_average = copy.deepcopy(model), copy.deepcopy(average)
    shard_linears(model)
    shard_linears(average)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, reference)]
    for step in range(5):
        mean_square(model, batch_of(rank + step)).backward()
        backward_of_all_ranks(reference, world_size, step=step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pairs: list[Any] = [(average, model), (reference_average, reference)]
        with torch.no_grad():
            for slow, fast in pairs:
                for mean, weight in zip(slow.parameters(), fast.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
    with torch.no_grad():
        assert_weights(average, reference_average)
        x = batch_of(rank)
        assert_close(average(x), reference_average(x), "output of the average")


@case("the user's forward hook on a unit, set before wrapping")
def register_hook_through_wrapping_order(rank: int, world_size: int) -> None:
    model = small_mlp()
    model[2].register_forward_hook(lambda module, inputs, output: output * 2)
    check_one_step(model, rank, world_size)


@case("torch.compile of a wrapped model")
def compiled_blocks(rank: int, world_size: int) -> None:
    model = small_mlp()
    expected = reference_grads(model, world_size)
    shard_linears(model)
    torch._dynamo.reset()
    mean_square(torch.compile(model, backend="eager"), batch_of(rank)).backward()
    assert_grads(model, expected)
