"""The public surface of a sharded module, on one rank: options, methods, errors."""

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from conformance.parts import shard_linears, small_mlp
from torch import Tensor, nn

import fsdpx
from fsdpx import FSDPModule, MixedPrecisionPolicy, ShardedTensor, fully_shard, memory
from fsdpx.unit import unit_of, units


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def collectives(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, str]]:
    """Unit and operation of every collective that `run` issues."""
    with fsdpx.record_timeline(model) as timeline:
        run()
    comm = [record for record in timeline.records if record.lane == "comm"]
    return [(record.unit, record.operation) for record in sorted(comm, key=lambda r: r.issue_ns)]


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, sharded), whole in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.equal(sharded.grad.full_tensor(), whole.grad), name


def test_class_names_and_parameters_stay() -> None:
    model = small_mlp()
    before = {name: p.shape for name, p in model.named_parameters()}
    assert shard_linears(model) is model
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert {name: p.shape for name, p in model.named_parameters()} == before
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_forward_sees_whole_parameters_and_frees_them() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert type(self.weight) is nn.Parameter
            return super().forward(x)

    model = fully_shard(nn.Sequential(fully_shard(Looks(6, 6)), nn.Linear(6, 6)))
    model(batch())
    assert isinstance(model[0].weight, ShardedTensor)
    assert not unit_of(model[0]).is_gathered


def test_steps_are_two_gathers_and_one_reduction_for_each_freed_unit() -> None:
    model = shard_linears(nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]))
    x = batch().requires_grad_()
    model(x).sum().backward()
    issued = collectives(model, lambda: model(x).sum().backward())
    gathers, reductions = "all_gather", "reduce_scatter"
    # Issue order: the next unit's gather before the present one's forward, or its reduction.
    assert issued == [
        ("0", gathers),
        ("1", gathers),
        ("2", gathers),
        ("2", gathers),
        ("1", gathers),
        ("2", reductions),
        ("0", gathers),
        ("1", reductions),
        ("0", reductions),
    ]


def test_reshard_after_forward_false_saves_the_second_gather() -> None:
    model = shard_linears(small_mlp(), reshard_after_forward=False)
    issued = collectives(model, lambda: model(batch()).sum().backward())
    assert issued.count(("0", "all_gather")) == 1
    assert issued.count(("2", "all_gather")) == 1
    assert not any(unit.is_gathered for unit in units(model))


def test_kept_parameters_are_gathered_again_after_a_change() -> None:
    model = shard_linears(small_mlp(), reshard_after_forward=False)
    with torch.no_grad():
        before = model(batch())
        assert collectives(model, lambda: model(batch())) == []
        for parameter in model.parameters():
            parameter.mul_(2.0)
        assert not torch.equal(model(batch()), before)


def test_modules_of_a_list_form_one_unit() -> None:
    model, reference = small_mlp(), small_mlp()
    fully_shard([model[0], model[2]])
    fully_shard(model)
    assert unit_of(model[0]) is unit_of(model[2])
    run = lambda: model(batch()).sum().backward()  # noqa: E731
    assert collectives(model, run).count(("0", "all_gather")) == 2
    reference(batch()).sum().backward()
    assert_same_gradients(model, reference)


def test_unshard_gives_whole_attributes_until_reshard() -> None:
    model = shard_linears(small_mlp())
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model[0].weight, small_mlp()[0].weight)
    model[0].reshard()
    assert isinstance(model[0].weight, ShardedTensor)
    assert not unit_of(model[0]).is_gathered


def test_no_sync_adds_up_without_communication() -> None:
    model, reference = shard_linears(small_mlp()), small_mlp()
    with fsdpx.no_sync(model):
        issued = collectives(model, lambda: model(batch()).sum().backward())
    assert all(operation == "all_gather" for _, operation in issued)
    with pytest.raises(RuntimeError, match=r"gradient of parameter '0\.weight' is not there yet"):
        model[0].weight.grad.full_tensor()
    model(batch()).sum().backward()
    for _ in range(2):
        reference(batch()).sum().backward()
    assert_same_gradients(model, reference)


def test_gradients_add_up_over_synchronised_backwards() -> None:
    model, reference = shard_linears(small_mlp()), small_mlp()
    for _ in range(3):
        model(batch()).sum().backward()
        reference(batch()).sum().backward()
    assert_same_gradients(model, reference)


def test_a_gradient_that_the_user_keeps_is_not_overwritten() -> None:
    model = shard_linears(small_mlp())
    model(batch()).sum().backward()
    kept = model[0].weight.grad
    value = kept.full_tensor().clone()
    model.zero_grad()
    model(batch() * 3).sum().backward()
    assert torch.equal(kept.full_tensor(), value)
    assert not torch.equal(model[0].weight.grad.full_tensor(), value)


def test_gradient_memory_is_reused() -> None:
    model = shard_linears(small_mlp())
    addresses = set()
    for _ in range(3):
        model(batch()).sum().backward()
        addresses.add(model[0].weight.grad.to_local().data_ptr())
        model.zero_grad()
    assert len(addresses) == 1


def test_gradients_of_the_users_own_making_are_added_to() -> None:
    model, reference = shard_linears(small_mlp()), small_mlp()
    model[0].weight.grad = torch.ones(8, 6)
    reference[0].weight.grad = torch.ones(8, 6)
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    assert_same_gradients(model, reference)


def test_divide_factor() -> None:
    model, reference = shard_linears(small_mlp()), small_mlp()
    model[0].set_gradient_divide_factor(4.0)
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), reference[0].weight.grad / 4)
    assert torch.equal(model[2].weight.grad.full_tensor(), reference[2].weight.grad)


def test_chosen_prefetch_replaces_the_recorded_order() -> None:
    model = shard_linears(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]))
    model[0].set_modules_to_forward_prefetch([model[1], model[3]])
    with torch.no_grad():
        issued = collectives(model, lambda: model(batch()))
    assert [unit for unit, _ in issued][:3] == ["0", "1", "3"]
    assert [unit for unit, _ in issued].count("3") == 1


def test_post_accumulate_hooks_run_once_with_the_final_gradient() -> None:
    model, reference = shard_linears(small_mlp()), small_mlp()
    seen: list[Tensor] = []
    weight = model[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], reference[0].weight.grad)


def test_forgotten_models_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(memory, "_release", lambda comm, number: released.append(number))
    model = shard_linears(small_mlp())
    model(batch()).sum().backward()
    assert released == []
    del model
    gc.collect()
    assert len(released) == 1


def test_mixed_precision_computes_in_one_dtype_and_keeps_the_other() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = shard_linears(small_mlp(), mp_policy=policy)
    seen = []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    output = model(batch())
    output.sum().backward()
    assert output.dtype == torch.float32
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_slicing_a_sequential_gives_a_plain_one() -> None:
    part = shard_linears(small_mlp())[:2]
    assert type(part) is nn.Sequential


def test_meta_parameters_are_made_after_wrapping() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    shard_linears(model)
    with pytest.raises(RuntimeError, match=r"unit '0' is still on the meta device.*to_empty"):
        model(batch())
    model.reset_iter_state()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for index in (0, 2):
        model[index].reset_parameters()
    reference = small_mlp()
    assert torch.equal(model(batch()), reference(batch()))


# ---- refusals


def test_shared_parameters_in_two_units_are_refused_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    fully_shard(model["a"])
    with pytest.raises(ValueError, match=r"'weight' is shared with 'weight'.*unit of Linear"):
        fully_shard(model["b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch must be an integer >= 0"),
        ({"zero_stage": 0}, "zero_stage must be 1, 2 or 3, got 0"),
        ({"zero_stage": 2, "reshard_after_forward": True}, "True contradicts zero_stage=2"),
        ({"comm": "smoke"}, "comm must be one of auto, shm, c10d"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=2 is not possible"),
        ({"reshard_after_forward": 0}, "a divisor of the number of ranks"),
        ({"shard_placement_fn": lambda p: None}, "shard_placement_fn is not supported"),
        ({"offload_policy": "cpu"}, "offload_policy must be an OffloadPolicy"),
        ({"granularity": "column"}, "granularity"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    model = small_mlp()
    with pytest.raises(ValueError, match=message):
        fully_shard(model, **options)
    assert type(model) is nn.Sequential
    assert type(model[0].weight) is nn.Parameter


def test_resharding_to_one_rank_means_to_keep() -> None:
    model = fully_shard(nn.Linear(6, 6), reshard_after_forward=1)
    run = lambda: model(batch()).sum().backward()  # noqa: E731
    assert [operation for _, operation in collectives(model, run)].count("all_gather") == 1


def test_modules_that_cannot_be_units_are_refused() -> None:
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="already sharded"):
        fully_shard(model)
    with pytest.raises(ValueError, match="empty"):
        fully_shard([])


TAKES_MODULES = {
    "pickle": (pickle.dumps, "cannot be pickled.* save .*state_dict"),
    "copy": (copy.copy, "cannot be pickled, nor copied by copy.copy.* use copy.deepcopy"),
    "script": (torch.jit.script, "can't be compiled by torch.jit.script"),
    "trace": (lambda model: torch.jit.trace(model, batch()), "can't be traced"),
    "export": (lambda model: torch.export.export(model, (batch(),)), "can't be traced or exported"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(("take", "message"), TAKES_MODULES.values(), ids=TAKES_MODULES)
def test_what_takes_a_module_for_a_program_is_refused(
    take: Callable[[nn.Module], object], message: str, called_before: bool
) -> None:
    model, reference = shard_linears(small_mlp()), small_mlp()
    if called_before:
        model(batch())
    with pytest.raises(RuntimeError, match=f"FSDPSequential {message}"):
        take(model)
    for each in (model, reference):
        each(batch()).sum().backward()
    assert_same_gradients(model, reference)


def test_reading_a_freed_parameter_names_it() -> None:
    class Leaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.leak = [self.weight]
            return super().forward(x)

    inner = Leaks(6, 6)
    model = fully_shard(nn.Sequential(fully_shard(inner)))
    model(batch())
    leak = inner.leak[0]
    assert leak.shape == (6, 6)
    with pytest.raises(RuntimeError, match=r"'weight' of unit '0' is not gathered"):
        leak.sum()
    with pytest.raises(RuntimeError, match=r"unit '0' is not gathered"):
        leak.data_ptr()


@pytest.mark.parametrize("edited", [lambda weight: weight, lambda weight: weight.data])
def test_editing_a_whole_parameter_in_forward_is_an_error(
    edited: Callable[[Tensor], Tensor],
) -> None:
    class Edits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                edited(self.weight).mul_(2.0)
            return super().forward(x)

    model = fully_shard(nn.Sequential(fully_shard(Edits(6, 6))))
    with pytest.raises(RuntimeError, match=r"unit '0'.*in place"):
        model(batch())
