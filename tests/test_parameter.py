"""Sharded tensors in one process: what they look like, write to, copy and refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded import pair, piece_of, random_gradients, set_gradients, trained, whole
from torch import nn

from fsdpx.layout import ParameterInfo, Ranges, plan_unit
from fsdpx.parameter import ShardedTensor, Spec, boxes

# ---- looks ----


def test_looks_like_the_whole_parameter() -> None:
    p = trained()
    assert isinstance(p, nn.Parameter)
    assert p.shape == (7, 5)
    assert (p.ndim, p.numel(), len(p), p.stride()) == (2, 35, 7, (5, 1))
    assert p.is_leaf
    assert p.requires_grad
    assert p.dtype == torch.float32
    assert torch.equal(p.to_local(), torch.arange(3.0, 17.0))
    assert "'layer.w'" in repr(p)
    assert "[3, 17)" in repr(p)
    assert not isinstance(p.detach(), nn.Parameter)
    assert {p: 1}[p] == 1


def test_modules_take_it() -> None:
    module, p = nn.Module(), trained()
    module.w = p
    module.register_parameter("v", p)
    assert module.w is p
    assert [name for name, _ in module.named_parameters(remove_duplicate=False)] == ["w", "v"]
    assert isinstance(nn.Parameter(p.detach()), ShardedTensor)


def test_spec_is_immutable_and_shared() -> None:
    spec = trained()._spec
    with pytest.raises(AttributeError, match="immutable"):
        spec.name = "other"
    assert copy.deepcopy(spec) is spec
    assert copy.copy(spec) is spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert "rank 1 of 3" in repr(spec)
    with pytest.raises(ValueError, match="rank 3 is not one of 3"):
        Spec("w", (3,), [(0, 1), (1, 2), (2, 3)], 3, None)


def test_ranges_of_different_units_that_cut_alike_fit_together() -> None:
    def spec(ranges: Any) -> Spec:
        return Spec("w", (40,), ranges, 0, None)

    infos = [ParameterInfo(n, (40,), torch.float32, torch.float32, torch.float32) for n in "abcd"]
    layout = plan_unit(infos, 2)  # 256 elements: a, b on rank 0, c, d on rank 1
    a, b, c = (layout.ranges(index) for index in range(3))
    assert a != b
    assert spec(a).same_sharding(spec(b))
    assert not spec(a).same_sharding(spec(c))
    assert spec(a).same_sharding(spec(list(b)))
    assert not spec(Ranges(0, 40, 32, 2)).same_sharding(spec(Ranges(0, 40, 64, 2)))


@pytest.mark.parametrize("shape", [(), (6,), (3, 4), (2, 3, 4), (2, 3, 2, 2), (1, 1, 5)])
def test_boxes_cover_a_range_in_order(shape: tuple[int, ...]) -> None:
    full = torch.arange(int(torch.Size(shape).numel())).view(shape)
    for begin in range(full.numel() + 1):
        for end in range(begin, full.numel() + 1):
            found = boxes(shape, begin, end)
            assert len(found) <= max(1, 2 * len(shape) - 1)
            parts = []
            for offsets, sizes, start in found:
                part = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                assert start == sum(p.numel() for p in parts)
                parts.append(part.reshape(-1))
            assert torch.equal(torch.cat([torch.empty(0), *parts]), torch.arange(begin, end))


@pytest.mark.parametrize("begin", [0, 3, 17, 30])
@pytest.mark.parametrize("length", [0, 1, 4, 15])
def test_piece_of_any_value(begin: int, length: int) -> None:
    spec = piece_of(torch.zeros(3, 4, 5), begin, begin + length)._spec
    contiguous = torch.randn(3, 4, 5)
    values = [contiguous, torch.randn(5, 4, 3).permute(2, 1, 0), torch.randn(4, 1), torch.randn(5)]
    for value in [*values, torch.tensor(2.0)]:
        expected = value.expand(3, 4, 5).reshape(-1)[begin : begin + length]
        assert torch.equal(spec.piece(value), expected)


# ---- writes ----

WRITES: dict[str, Callable[[ShardedTensor], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(3),
    "copy_": lambda p: p.copy_(torch.ones(7, 5)),
    "copy_ scalar": lambda p: p.copy_(torch.tensor(1.0)),
    "normal_": lambda p: p.normal_(),
    "data": lambda p: p.data.mul_(2),
    "data =": lambda p: setattr(p, "data", torch.ones(7, 5)),
    "detach": lambda p: p.detach().add_(1),
    "view": lambda p: p.view(-1).add_(1),
    "view of view": lambda p: p.unsqueeze(0).view(35).detach().add_(1),
    "copy.copy": lambda p: copy.copy(p).detach().add_(1),
    "mask": lambda p: p.__setitem__(p > 2, 0.0),
    "masked_fill_": lambda p: p.masked_fill_(p > 2, 0.0),
    "out": lambda p: torch.add(p, p, out=p.detach()),
    "lerp_": lambda p: p.lerp_(torch.ones(7, 5), 0.5),
    "foreach": lambda p: torch._foreach_mul_([p], 2),
    "foreach copy": lambda p: torch._foreach_copy_([p], [torch.ones(7, 5)]),
    "foreach zero": lambda p: torch._foreach_zero_([p]),
    "to_local": lambda p: p.to_local().add_(1),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("begin", "end"), [(0, 35), (4, 20), (20, 20)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_write_counts_on_the_flat_tensor(
    write: str, begin: int, end: int, mode: Callable[[], Any]
) -> None:
    """Also where this rank holds nothing of the parameter."""
    flat = torch.zeros(64)
    p = trained(begin, end)
    p._local = flat[: end - begin].copy_(p._local)
    before = flat._version
    with mode():
        WRITES[write](p)
    if write == "to_local" and mode is torch.inference_mode:
        return  # torch's own business
    assert flat._version > before
    assert torch.equal(flat[: end - begin], p.to_local())


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("mode", ["foreach", "fused", "single"])
def test_optimizer_steps_count(optimizer: str, mode: str) -> None:
    flat = torch.zeros(64)
    held, empty = trained(0, 20), trained(20, 20)
    held._local, empty._local = flat[:20], flat[20:20]
    for p in (held, empty):
        p.grad = ShardedTensor(torch.ones_like(p._local), p._spec)
    kwargs = {"foreach": mode == "foreach"} if mode != "fused" else {"fused": True}
    for params in ([held, empty], [empty]):
        before = flat._version
        getattr(torch.optim, optimizer)(params, lr=0.1, **kwargs).step()
        assert flat._version > before


def test_reads_do_not_count() -> None:
    flat = torch.zeros(35)
    p = trained(0, 35)
    p._local = flat.view(-1)[:]
    before = flat._version
    with torch.no_grad():
        _ = p * 2, torch._foreach_add([p], 1), p.clone(), p.view(-1), p == 3, p.detach(), p.data
    assert flat._version == before


def test_the_piece_can_be_repointed() -> None:
    p = trained()
    p._local = torch.zeros(14)
    with torch.no_grad():
        p.add_(1)
    assert torch.equal(p.to_local(), torch.ones(14))


def test_data_takes_whole_and_sharded_values() -> None:
    p = trained()
    p.data = torch.ones(7, 5)
    assert torch.equal(p.to_local(), torch.ones(14))
    p.data = (p * 2).detach()
    assert torch.equal(p.to_local(), torch.full((14,), 2.0))
    with pytest.raises(RuntimeError, match=r"'layer.w' is sharded: \.data .*module\.to"):
        p.data = torch.ones(7, 5, dtype=torch.float64)


def test_other_memory_given_to_an_alias_stays_the_aliases() -> None:
    p = trained()
    before = p.to_local().clone()
    p.to_local().data = torch.zeros(14)
    assert torch.equal(p.to_local(), before)


def test_out_must_be_sharded_alike() -> None:
    p = trained().detach()
    with pytest.raises(RuntimeError, match="unsharded tensor"):
        torch.add(p, p, out=torch.empty(7, 5))
    with pytest.raises(RuntimeError, match="sharded differently"):
        torch.add(p, p, out=trained(0, 35).detach())


# ---- values without dimensions ----


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 0)])
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.int64])
def test_type_promotion_without_dimensions(begin: int, end: int, other: torch.dtype) -> None:
    """A 0-dim parameter yields in promotion, and the dtype does not depend on who holds it."""
    full = torch.tensor(1.5)
    p = piece_of(full, begin, end)
    for value in (torch.tensor(2, dtype=other), torch.tensor(2), 2, 2.5):
        assert (p * value).dtype == (full * value).dtype
        assert (p / value).dtype == (full / value).dtype
        assert (p > value).dtype == torch.bool
    got = p * 2.5
    assert got.shape == ()
    assert got.to_local().tolist() == [3.75][: end - begin]
    p.mul_(torch.tensor(2.0, dtype=torch.float64))
    assert p.to_local().tolist() == [3.0][: end - begin]


# ---- like, new, view ----


def test_like_and_new() -> None:
    p = trained().detach()
    for made in (torch.zeros_like(p), torch.empty_like(p, memory_format=torch.channels_last)):
        assert isinstance(made, ShardedTensor)
        assert made.shape == (7, 5)
        assert made.to_local().shape == (14,)
    assert torch.zeros_like(p, dtype=torch.float64).to_local().dtype == torch.float64
    assert torch.empty_like(p, device="meta").to_local().is_meta
    assert p.to("meta").is_meta
    for new in (p.new_empty((2, 3)), p.new_zeros(2, 3), p.new_ones((2, 3)), p.new_empty(p.shape)):
        assert type(new) is torch.Tensor
        assert new.dtype == p.dtype
    assert type(p.new_full((2,), 1.0)) is torch.Tensor
    assert type(p.new_tensor([1.0])) is torch.Tensor
    staged = p.new_empty(p.size(), device="cpu")
    assert isinstance(staged, ShardedTensor)


def test_views_keep_the_elements_order() -> None:
    p = trained().detach()
    for view in (
        p.view(-1),
        p.flatten(),
        p.reshape(5, 7),
        p.unsqueeze(1),
        p.view(1, 35).squeeze(0),
    ):
        assert isinstance(view, ShardedTensor)
        assert view.to_local().data_ptr() == p.to_local().data_ptr()
    assert p.view(5, -1).shape == (5, 7)
    with pytest.raises(RuntimeError, match="sharded differently"):
        p.view(-1) + p
    with pytest.raises(RuntimeError, match="shape"):
        p.view(4, 9)


def test_format_conversions_keep_the_order() -> None:
    full = torch.randn(2, 3, 4, 5)
    p = piece_of(full, 10, 100)
    moved = p.to(memory_format=torch.channels_last)
    assert torch.equal(moved.to_local(), full.reshape(-1)[10:100])
    assert p.to(torch.bfloat16, memory_format=torch.channels_last).to_local().numel() == 90


# ---- initialisation ----

INITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "constant": lambda t: nn.init.constant_(t, 0.3),
    "ones": nn.init.ones_,
    "orthogonal": nn.init.orthogonal_,
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "random": lambda t: t.random_(7),
    "exponential": lambda t: t.exponential_(),
    "log_normal": lambda t: t.log_normal_(),
    "cauchy": lambda t: t.cauchy_(),
    "geometric": lambda t: t.geometric_(0.5),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
    "randn_like": lambda t: t.copy_(torch.randn_like(t)),
    "randint_like": lambda t: t.copy_(torch.randint_like(t, 9)),
    "dropout": lambda t: t.copy_(nn.functional.dropout(t.fill_(1.0))),
}


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("shape", [(7, 5), (4, 3, 2, 2)])
def test_init_equals_the_unsharded_init(init: str, shape: tuple[int, ...]) -> None:
    full = torch.zeros(shape)
    p = piece_of(full, 3, 31)
    with torch.no_grad():
        torch.manual_seed(7)
        INITS[init](full)
        torch.manual_seed(7)
        INITS[init](p)
    assert torch.equal(p.to_local(), p._spec.piece(full))


def test_reset_parameters_equals_the_unsharded_one() -> None:
    module, reference = pair(0, 1)
    for model in (module, reference):
        torch.manual_seed(3)
        model.a.reset_parameters()
        model.b.reset_parameters()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p), q)


# ---- gradients ----


def test_gradients_are_assigned_as_for_any_parameter() -> None:
    p = trained()
    p.grad = ShardedTensor(torch.ones(14), p._spec)
    p.grad = torch.ones(7, 5)  # a whole one is sliced when used
    torch.optim.SGD([p], lr=1.0).step()
    assert torch.equal(p.to_local(), torch.arange(3.0, 17.0) - 1)
    with pytest.raises(RuntimeError, match="size"):
        p.grad = torch.ones(14)
    with pytest.raises(RuntimeError, match="dtype"):
        p.grad = ShardedTensor(torch.ones(14).bfloat16(), p._spec)


def test_hooks_wait_for_the_engine() -> None:
    p, seen = trained(), []
    handle = p.register_post_accumulate_grad_hook(seen.append)
    for hook in p._post_accumulate_grad_hooks.values():
        hook(p)
    assert seen[0] is p
    handle.remove()
    assert not p._post_accumulate_grad_hooks


def test_zero_grad() -> None:
    module, reference = pair(0, 1)
    set_gradients(module, random_gradients(reference, 0))
    module.zero_grad(set_to_none=False)
    assert all(p.grad.to_local().abs().sum() == 0 for p in module.parameters())
    module.zero_grad()
    assert all(p.grad is None for p in module.parameters())


def test_whole_values_of_trained_parameters_under_grad_mode_are_errors() -> None:
    p = trained()
    for compute in (
        p.sum,
        p.norm,
        p.square().sum,
        p.mean,
        p.max,
        lambda: torch.dot(p.flatten(), p.flatten()),
    ):
        with pytest.raises(RuntimeError, match=r"'layer.w' .* silently get no gradient.*no_grad"):
            compute()
    for compute in (lambda: p @ torch.ones(5), lambda: nn.functional.linear(torch.ones(5), p)):
        with pytest.raises(RuntimeError, match=r"'layer.w' .* is sharded"):
            compute()
