"""Sharded tensors on several ranks: whole reads, reductions, clipping, gradient scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded import pair, random_gradients, set_gradients, shard_tensors, whole
from torch import nn

from fsdpx.layout import Ranges
from fsdpx.parameter import ShardedTensor, Spec, collectives

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8]
DTYPES += [torch.bool, torch.complex64]


class Counter:
    """Counts collectives."""

    def __enter__(self) -> Counter:
        self.count, self._all_reduce = 0, dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._all_reduce(*args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._all_reduce


def agree(value: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    mine = value.reshape(-1).contiguous().view(torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return all(torch.equal(mine, other) for other in theirs)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert agree(got)


def pieces(full: torch.Tensor, ranges: list[tuple[int, int]], rank: int) -> ShardedTensor:
    spec = Spec("w", full.shape, ranges, rank, dist.group.WORLD)
    return ShardedTensor(spec.piece(full).clone(), spec)


def cuts(numel: int, world_size: int) -> list[list[tuple[int, int]]]:
    """Ways to spread: evenly, all on one rank, uneven with an empty piece, all on the last."""
    even = list(Ranges(0, numel, -(-numel // world_size), world_size))
    first = [(0, numel)] + [(numel, numel)] * (world_size - 1)
    last = [(0, 0)] * (world_size - 1) + [(0, numel)]
    uneven = [(0, numel // 5), (numel // 5, numel // 5), (numel // 5, numel)][-world_size:]
    return [even, first, last, [(0, uneven[0][1]), *uneven[1:]]]


# ---- whole reads ----


def check_full_tensor(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for shape in [(7, 5), (), (3, 0), (200,)]:
            full = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
            for ranges in cuts(full.numel(), world_size):
                p = pieces(full, ranges, rank)
                got = p.full_tensor()
                assert type(got) is torch.Tensor
                assert not got.requires_grad
                assert got.shape == full.shape
                assert torch.equal(got, full)
    even = pieces(torch.ones(64), list(Ranges(0, 64, 32, world_size)), rank)
    assert even.full_tensor().data_ptr() != even.to_local().data_ptr()
    assert even.to("meta").full_tensor().shape == (64,)


def check_subgroup(rank: int, world_size: int) -> None:
    """With replicas, only the ranks of one shard group talk to each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    values = torch.arange(40.0) * (1 + rank // 2)
    p = shard_tensors([("w", values)], rank % 2, 2, group=group).parameters["w"].detach()
    assert torch.equal(p.full_tensor(), values)
    torch.testing.assert_close(p.sum(), values.sum())
    torch.testing.assert_close(p.norm(), values.norm())
    assert torch.equal(p, p.clone())


@pytest.mark.parametrize("world_size", [2, 3])
def test_full_tensor(world_size: int) -> None:
    run_ranks(world_size, check_full_tensor)


def test_subgroup() -> None:
    run_ranks(4, check_subgroup)


# ---- reductions ----


def check_reductions(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32):
        full = torch.randn((4, 9), generator=torch.Generator().manual_seed(2)) * 9
        full = (full.abs() + 1).to(dtype) * torch.tensor([1, -1, 1, 1, -1, 1, 1, 1, 1], dtype=dtype)
        for ranges in cuts(36, world_size):
            p = pieces(full, ranges, rank)
            close(
                p.sum(),
                full.float().sum().to(full.sum().dtype) if dtype == torch.bfloat16 else full.sum(),
            )
            close(p.max(), full.max())
            close(p.min(), full.min())
            close(p.amax(), full.amax())
            close(p.amin((0, 1)), full.amin((0, 1)))
            close(p.sum((0, 1), keepdim=True), full.sum((0, 1), keepdim=True))
            close((p > 30).any(), torch.tensor(False))
            close((p < -1).any(), torch.tensor(True))
            close((p > -30).all(), torch.tensor(True))
            close((p > 0).all(), torch.tensor(False))
            close((p > 0).sum(), (full > 0).sum())
            close(torch.count_nonzero(p - full[0, 0]), torch.count_nonzero(full - full[0, 0]))
            close(p.isnan().any(), torch.tensor(False))
            if dtype.is_floating_point:
                close(p.isfinite().all(), torch.tensor(True))
                close(
                    p.mean(),
                    full.float().mean().to(dtype) if dtype == torch.bfloat16 else full.mean(),
                )
                close(p.sum(dtype=torch.float64), full.sum(dtype=torch.float64))
            if dtype in (torch.float32, torch.float64):
                flat = full.reshape(-1)
                close(torch.dot(p.flatten(), p.view(-1)), torch.dot(flat, flat))
                close(torch.vdot(p.flatten(), p.view(-1)), torch.vdot(flat, flat))
                close(torch.dot(p.flatten(), flat), torch.dot(flat, flat))


def check_extremes_of_integers(rank: int, world_size: int) -> None:
    """Beyond what a double can hold, and at the ends of the type."""
    for values in ([2**53 + 1, 2**53, 5], [-(2**63), 3, 4], [2**63 - 1, -(2**63), 0]):
        full = torch.tensor(values)
        for ranges in cuts(3, world_size):
            p = pieces(full, ranges, rank)
            close(p.max(), full.max())
            close(p.min(), full.min())


def check_nan_anywhere(rank: int, world_size: int) -> None:
    for place in (0, 9, 17):
        full = torch.arange(18.0)
        full[place] = math.nan
        p = pieces(full, cuts(18, world_size)[0], rank)
        for value in (p.max(), p.min(), p.sum(), p.norm(), p.norm(math.inf), p.norm(-math.inf)):
            assert math.isnan(value)
        close(p.isnan().any(), torch.tensor(True))


def check_equal(rank: int, world_size: int) -> None:
    full = torch.arange(18.0).view(3, 6)
    for ranges in cuts(18, world_size):
        p = pieces(full, ranges, rank)
        for place in (0, 7, 17):
            other = full.clone()
            other.view(-1)[place] += 1e-6 if place else 1e-12
            q = pieces(other, ranges, rank)
            for mine, whole_one, same in ((p, full, True), (q, full, bool((other == full).all()))):
                assert torch.equal(mine, whole_one) is same
                assert torch.equal(whole_one, mine) is same
                assert torch.equal(mine, p) is same
            assert torch.allclose(q, p)
            assert torch.allclose(p, other)
            assert not torch.allclose(q + 1, p)
        assert not torch.equal(p, torch.zeros(2))


@pytest.mark.parametrize(
    "check", [check_reductions, check_extremes_of_integers, check_nan_anywhere, check_equal]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions(check: Any, world_size: int) -> None:
    run_ranks(world_size, check)


# ---- norms and clipping ----

ORDERS = [1, 2, 3, 3.5, 0, math.inf, -math.inf, -1]


def check_norms(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        fulls = [
            torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (18, 4, 7)
        ]
        fulls[0][3] = 0
        for order in ORDERS:
            expected = [torch.linalg.vector_norm(f.double(), order).to(dtype) for f in fulls]
            for cut in range(4):
                ps = [pieces(f, cuts(f.numel(), world_size)[cut], rank) for f in fulls]
                with Counter() as counter:
                    together = torch._foreach_norm([*ps, fulls[0]], order)
                    assert counter.count == 1
                for got, want in zip(together, [*expected, expected[0]], strict=True):
                    close(got, want)
                for p, want in zip(ps, expected, strict=True):
                    close(torch.linalg.vector_norm(p, order), want)
                    close(p.norm(order), want)
    p, f = ps[0], fulls[0]
    close(p.norm(2, dim=0, keepdim=True), f.norm(2, dim=0, keepdim=True))
    close(torch._foreach_norm([p], 2, dtype=torch.float64)[0], f.double().norm())
    close(p.float().norm(dtype=torch.float64), f.double().norm())
    close(torch._foreach_powsum([p.float()], 2)[0], f.float().square().sum())


def check_mixed_dtypes(rank: int, world_size: int) -> None:
    fulls = [torch.randn(9).to(d) for d in (torch.float32, torch.bfloat16, torch.float64)]
    for full in fulls:
        dist.broadcast(full, 0)
    ps = [pieces(f, cuts(9, world_size)[0], rank) for f in fulls]
    for order in (2, math.inf):
        with Counter() as counter:
            got = torch._foreach_norm(ps, order)
            assert counter.count == 1
        for value, full in zip(got, fulls, strict=True):
            close(value, torch.linalg.vector_norm(full.double(), order).to(full.dtype))


def check_clip(rank: int, world_size: int) -> None:
    for order in (1, 2, 3, math.inf, -math.inf, 0):
        for foreach in (None, True, False):
            module, reference = pair(rank, world_size)
            gradients = random_gradients(reference, 1)
            gradients["b.bias"] = None
            if order == math.inf:
                gradients["nothing"] = reference.nothing.grad  # torch has no such norm of nothing
            set_gradients(module, gradients)
            set_gradients(
                reference, {k: g if g is None else g.clone() for k, g in gradients.items()}
            )
            if order == -math.inf:
                reference.nothing.grad = module.nothing.grad = None
            with Counter() as counter:
                total = nn.utils.clip_grad_norm_(module.parameters(), 0.5, order, foreach=foreach)
                assert foreach is False or counter.count == 1
            close(
                total, nn.utils.clip_grad_norm_(reference.parameters(), 0.5, order, foreach=foreach)
            )
            for p, q in zip(module.parameters(), reference.parameters(), strict=True):
                if q.grad is not None:
                    torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-6, atol=1e-7)
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    assert whole(module.a.weight.grad).abs().max() <= 0.1


def check_clip_nonfinite(rank: int, world_size: int) -> None:
    """Found on one rank only, known on all."""
    for bad in (math.nan, math.inf):
        for place in ("a.weight", "c.bias"):
            for order in (1, 2, math.inf):
                module, reference = pair(rank, world_size)
                gradients = random_gradients(reference, 1)
                gradients[place].view(-1)[-1] = bad
                set_gradients(module, gradients)
                gradients.pop("nothing")
                expected = torch.nn.utils.get_total_norm(list(gradients.values()), order)
                close(
                    nn.utils.get_total_norm([p.grad for p in module.parameters()], order), expected
                )
                with pytest.raises(RuntimeError, match="non-finite"):
                    nn.utils.clip_grad_norm_(
                        module.parameters(), 1.0, order, error_if_nonfinite=True
                    )


@pytest.mark.parametrize(
    "check", [check_norms, check_mixed_dtypes, check_clip, check_clip_nonfinite]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_norms(check: Any, world_size: int) -> None:
    run_ranks(world_size, check)


def test_maximum_with_nan_does_not_depend_on_the_backend() -> None:
    values = torch.tensor([1.0, math.nan, -math.inf])
    assert collectives.all_reduce_max(values, None) is values


# ---- gradient scaler ----


def check_scaler(rank: int, world_size: int) -> None:
    for fused in (False, True):
        for bad in (None, math.inf, math.nan):
            module, reference = pair(rank, world_size)
            optimizers = [
                torch.optim.AdamW(m.parameters(), 0.1, fused=fused) for m in (module, reference)
            ]
            scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
            before = whole(module.a.weight).clone()
            gradients = random_gradients(reference, 1)
            if bad is not None:
                gradients["c.bias"][-1] = bad  # on one rank only
            set_gradients(module, gradients)
            set_gradients(reference, gradients)
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.scale(torch.tensor(1.0))
                with Counter() as counter:
                    if not fused:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                assert counter.count == (scaler is scalers[0])
            assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0 if bad is None else 4.0)
            assert torch.equal(whole(module.a.weight), before) == (bad is not None)
            for p, q in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(whole(p), q.detach(), rtol=1e-6, atol=1e-7)


def check_trunc_normal(rank: int, world_size: int) -> None:
    full = torch.empty(7, 50)
    p = shard_tensors([("w", full)], rank, world_size).parameters["w"].detach()
    for bounds in ((-2, 2), (1, 2)):
        torch.manual_seed(5)
        nn.init.trunc_normal_(full, a=bounds[0], b=bounds[1])
        torch.manual_seed(5)
        nn.init.trunc_normal_(p, a=bounds[0], b=bounds[1])
        assert torch.equal(p.full_tensor(), full)


def check_inference_mode(rank: int, world_size: int) -> None:
    full = torch.arange(40.0).view(5, 8)
    p = shard_tensors([("w", full)], rank, world_size).parameters["w"]
    with torch.inference_mode():
        assert p.norm() == full.norm()
        assert torch.equal((p * 2).full_tensor(), full * 2)
        assert p.isfinite().all()
        with pytest.raises(RuntimeError, match=r"'w' .* is sharded"):
            nn.functional.linear(torch.ones(2, 8), p)


@pytest.mark.parametrize("check", [check_scaler, check_trunc_normal, check_inference_mode])
def test_on_two_ranks(check: Any) -> None:
    run_ranks(2, check)
