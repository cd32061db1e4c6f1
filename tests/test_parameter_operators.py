"""Every operator of the installed torch is either right on pieces or refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fsdpx.parameter import ShardedTensor, Spec, table
from fsdpx.parameter.elementwise import ELEMENTWISE as HANDLERS
from fsdpx.parameter.elementwise import POINTWISE
from fsdpx.parameter.foreach import FOREACH, FUSED, foreach, foreach_, fused

SHAPE = (3, 5)
RANGES = [(0, 4), (4, 4), (4, 15)]
SPECS = [Spec("w", SHAPE, RANGES, rank, None) for rank in range(len(RANGES))]


def all_operators() -> Iterator[OpOverload]:
    """All overloads in torch's own namespace."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            packet = getattr(torch.ops.aten, schema.name[6:], None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if overload is not None:
                yield overload


OPERATORS = sorted(set(all_operators()), key=str)
ELEMENTWISE = [op for op in OPERATORS if table.find(op) in HANDLERS]

# Handled one by one; tests elsewhere run each of them.
_NAMED = """
    _amp_foreach_non_finite_check_and_unscale_ _foreach_norm _foreach_powsum _unsafe_view alias all
    allclose amax amin any bernoulli_ cauchy_ copy_ count_nonzero detach dot equal exponential_
    geometric_ index_put index_put_ is_pinned lift_fresh linalg_vector_norm log_normal_ max mean min
    new_empty new_empty_strided new_full new_ones new_zeros norm normal_ rand_like randint_like
    randn_like random_ record_stream reshape squeeze sum uniform_ unsqueeze vdot view
"""
NAMED = _NAMED.split()

# Tagged pointwise by torch, but no function of one element at a time, random, or without a kernel
# that could be run here: they stay refused.
_REFUSED_THOUGH_TAGGED = """
    _conj_physical equal ldexp max min rrelu special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w __ilshift__ __ixor__ __lshift__ __rshift__ __xor__ clip
    float_power true_divide
"""
REFUSED_THOUGH_TAGGED = _REFUSED_THOUGH_TAGGED.split()


def base_name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def test_handlers_are_only_those_reviewed() -> None:
    """A new operator in a new torch is not taken for element-wise because of a tag or a prefix."""
    handled = {base_name(op) for op in OPERATORS if table.find(op) is not None}
    lists = {f"_foreach_{name}" for name in FOREACH} | {f"_foreach_{name}_" for name in FOREACH}
    elementwise = {base_name(op) for op in ELEMENTWISE}
    unexpected = handled - lists - FUSED - set(NAMED) - elementwise
    assert unexpected == set()
    assert set(NAMED) <= handled
    assert handled >= FUSED


def test_every_tagged_operator_is_decided() -> None:
    tagged = {base_name(op) for op in OPERATORS if torch.Tag.pointwise in op.tags}
    undecided = {
        name
        for name in tagged
        if name.removesuffix("_") not in POINTWISE
        and name.removesuffix("_") not in REFUSED_THOUGH_TAGGED
        and name not in REFUSED_THOUGH_TAGGED
    }
    assert undecided == set()
    present = {base_name(op).removesuffix("_") for op in OPERATORS}
    assert present >= POINTWISE, "names that no operator has"


def test_reductions_among_lists_are_not_taken_for_elementwise() -> None:
    aten = torch.ops.aten
    for name in ("_foreach_mm", "_foreach_max"):
        for overload in getattr(aten, name).overloads():
            assert table.find(getattr(getattr(aten, name), overload)) is None
    assert table.find(aten._foreach_norm.Scalar) not in (foreach, foreach_, fused)
    assert table.find(aten._fused_rms_norm.default) is None
    assert table.find(aten._fused_dropout.default) is None


# ---- sampled runs: the pieces of the result are the result's pieces ----

SCALARS: dict[str, list[Any]] = {
    "int": [2],
    "float": [0.5],
    "number": [2, 0.5],
    "Scalar": [2, 0.5],
    "bool": [True],
    "str": ["trunc", "floor", "none"],
    "ScalarType": [torch.float64],
    "Device": [torch.device("cpu")],
}


def tensors(kind: int) -> list[torch.Tensor]:
    """Operand values: floats in (0, 1), any floats, integers, booleans."""
    generator = torch.Generator().manual_seed(kind)
    uniform = [torch.rand(SHAPE, generator=generator) * 0.9 + 0.05 for _ in range(5)]
    if kind == 1:
        return [(value - 0.5) * 6 for value in uniform]
    if kind == 2:
        return [(value * 20 + 1).long() for value in uniform]
    return [value > 0.4 for value in uniform] if kind == 3 else uniform


def candidates(op: OpOverload) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments to try; most operators accept some of them only."""
    arguments = op._schema.arguments
    bounds = ("min", "max")  # of clamp, which wants one of them
    required = [a for a in arguments if not a.has_default_value() or a.is_out or a.name in bounds]
    for kind, mask_first in itertools.product((0, 1, 2, 3), (False, True)):
        values = iter(tensors(kind))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        choices: list[tuple[int | str, list[Any]]] = []
        for argument in required:
            text = str(argument.type).removeprefix("Optional[").removesuffix("]")
            value: Any
            if text == "Tensor":
                value = next(values)
                if argument.is_out:
                    value = None  # given its dtype by a run without it
                if mask_first and (argument.name in ("condition", "mask")):
                    value = value > 0.5
            elif text in SCALARS:
                value = SCALARS[text][0]
                choices.append((argument.name if argument.kwarg_only else len(args), SCALARS[text]))
            else:
                return
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        for pick in itertools.product(*(options for _, options in choices)):
            for (where, _), value in zip(choices, pick, strict=True):
                if isinstance(where, int):
                    args[where] = value
                else:
                    kwargs[where] = value
            yield list(args), dict(kwargs)


def outs_for(op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Gives `out` arguments an empty tensor of the right dtype."""
    names = [a.name for a in op._schema.arguments if a.is_out]
    if not names:
        return kwargs
    rest = {key: value for key, value in kwargs.items() if key not in names}
    for overload in op._overloadpacket.overloads():
        functional = getattr(op._overloadpacket, overload)
        if any(a.alias_info for a in functional._schema.arguments):
            continue
        try:
            result = functional(*args, **rest)
        except Exception:
            continue
        if isinstance(result, torch.Tensor) and len(names) == 1:
            return {**rest, names[0]: torch.zeros_like(result)}
    raise TypeError("no functional form to learn the dtype from")


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def shard(value: Any, rank: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return ShardedTensor(SPECS[rank].piece(value).clone(), SPECS[rank])


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def run_sampled(op: OpOverload) -> int:
    """Compares the operator on pieces with the pieces of its result; counts the comparisons."""
    compared = 0
    for args, kwargs in candidates(op):
        try:
            kwargs = outs_for(op, args, kwargs)
            expected = as_tuple(op(*map(clone, args), **{k: clone(v) for k, v in kwargs.items()}))
        except Exception:
            continue  # this operator takes other operands
        if "empty" in base_name(op):
            continue
        for rank in range(len(RANGES)):
            got = op(
                *[shard(value, rank) for value in args],
                **{key: shard(value, rank) for key, value in kwargs.items()},
            )
            for mine, whole in zip(as_tuple(got), expected, strict=True):
                assert isinstance(mine, ShardedTensor)
                assert mine.shape == whole.shape
                assert mine.dtype == whole.dtype
                piece = mine._spec.piece(whole)
                torch.testing.assert_close(mine._local, piece, rtol=2e-6, atol=1e-6, equal_nan=True)
        compared += 1
    return compared


# They need operands that the sampler does not make, or are covered by the operator they call.
NOT_SAMPLED = {"_pin_memory", "empty_like", "native_dropout_backward"}


@pytest.mark.parametrize(
    "name", sorted({base_name(op).removesuffix("_") for op in ELEMENTWISE} - NOT_SAMPLED)
)
def test_elementwise_operator(name: str) -> None:
    family = [op for op in ELEMENTWISE if base_name(op).removesuffix("_") == name]
    counts = {str(op): run_sampled(op) for op in family}
    assert sum(counts.values()) > 0, f"nothing was compared: {counts}"


# ---- lists ----


def list_arguments(op: OpOverload) -> list[Any]:
    """Arguments of an operator on lists of three tensors, one of them plain in the first list."""
    values = iter(range(10))
    kinds: dict[str, Any] = {
        "number": 2,
        "bool": False,
        "Tensor": torch.tensor(2.0),
        "List[number]": [2, 0.5, 3],
    }
    args = []
    for argument in op._schema.arguments:
        text = str(argument.type)
        if text == "List[Tensor]":
            k = next(values)
            args.append([(tensor + 1 if k else tensor) for tensor in tensors(0)[k : k + 3]])
        elif not argument.has_default_value():
            one_each = text == "Tensor" and argument.name == "scalars"
            args.append(torch.rand(3) + 1 if one_each else kinds[text])
    return args


LISTS = [op for op in OPERATORS if table.find(op) in (foreach, foreach_)]


@pytest.mark.parametrize("op", LISTS, ids=str)
def test_list_operator(op: OpOverload) -> None:
    def sharded(value: Any, mixed: bool, rank: int) -> Any:
        if not isinstance(value, list) or not isinstance(value[0], torch.Tensor):
            return value
        return [clone(t) if mixed and i == 1 else shard(t, rank) for i, t in enumerate(value)]

    def cloned(value: Any) -> Any:
        tensor_list = isinstance(value, list) and isinstance(value[0], torch.Tensor)
        return [tensor.clone() for tensor in value] if tensor_list else value

    for rank, mixed in itertools.product(range(len(RANGES)), (False, True)):
        args = list_arguments(op)
        plain, mine = [cloned(a) for a in args], [sharded(a, mixed, rank) for a in args]
        expected, got = op(*plain), op(*mine)
        if op._schema.is_mutable:
            expected, got = plain[0], mine[0]
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            if mixed and i == 1:
                torch.testing.assert_close(a, b)
            else:
                torch.testing.assert_close(a._local, SPECS[rank].piece(b), rtol=2e-6, atol=1e-6)


def num_lists(op: OpOverload) -> int:
    return sum(str(argument.type) == "List[Tensor]" for argument in op._schema.arguments)


@pytest.mark.parametrize(
    "op", [op for op in LISTS if op._schema.is_mutable and num_lists(op) > 1], ids=str
)
def test_list_operator_does_not_write_pieces_to_plain_tensors(op: OpOverload) -> None:
    args = list_arguments(op)
    others = [i for i, a in enumerate(args) if isinstance(a, list) and torch.is_tensor(a[0])][1:]
    args[others[0]][1] = shard(args[others[0]][1], 0)
    args[0][2] = shard(args[0][2], 0)
    with pytest.raises(RuntimeError, match=r"'w' \(3, 5\) is sharded .* unsharded tensor"):
        op(*args)
