"""Our communicators under torch's own fully_shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdpx.comm.fsdp2 import AllGather, ReduceScatter


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def _trains(rank: int, size: int, kind: str, divisor: float | None) -> float:
    model, reference = mlp(), mlp()
    for module in (model[0], model[2], model):
        fully_shard(module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AllGather(kind=kind))
            module.set_custom_reduce_scatter(ReduceScatter(kind=kind))
            if divisor is not None:
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(divisor)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, reference)]
    for step in range(4):
        inputs = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(step))
        model(inputs[4 * rank :][:4]).square().mean().backward()
        loss = reference(inputs).square().mean() * (1 if divisor is None else size / divisor)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((p.full_tensor() - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_fsdp2_trains_over_our_communicators(kind: str, divisor: float | None) -> None:
    assert max(run_ranks(2, _trains, kind, divisor)) < 1e-6


def _memory(rank: int, size: int) -> tuple[bool, bool]:
    gather = AllGather()
    cpu = torch.device("cpu")
    first = gather.allocate((4, 2), dtype=torch.float32, device=cpu)
    second = gather.allocate((8,), dtype=torch.float32, device=cpu)
    apart = first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    return apart, gather.allocate((8,), dtype=torch.float32, device=cpu).data_ptr() == address


def test_gathers_reuse_memory_that_nobody_holds() -> None:
    assert run_ranks(2, _memory) == [(True, True)] * 2


def test_other_reductions_are_refused() -> None:
    tensor = torch.ones(4)
    with pytest.raises(ValueError, match=r"MAX.* is not supported: call set_force_sum"):
        ReduceScatter()(tensor, tensor, None, dist.ReduceOp.MAX)
