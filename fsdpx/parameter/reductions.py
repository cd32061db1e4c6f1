"""Operators that reduce a whole tensor: computed on the pieces, combined over the group at once.

Results are plain tensors, equal on all ranks of the group, and eager: a partial result that waits
for its first use would hang the rank that prints it. One collective serves a whole list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fsdpx.parameter import owned
from fsdpx.parameter.collectives import Group, all_reduce, all_reduce_max, group_of
from fsdpx.parameter.operands import local_operand
from fsdpx.parameter.spec import Spec
from fsdpx.parameter.table import handles
from fsdpx.parameter.tensor import ShardedTensor, first_spec, refuse, refuse_for

aten = torch.ops.aten


def _refuse_gradient(tensors: Sequence[Any], func: OpOverload) -> None:
    """A gradient can't flow from a whole-tensor value back to pieces, so it must not seem to."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor) and tensor.requires_grad:
            what = "parameter" if tensor._is_param else "tensor (a gradient by create_graph=True?)"
            refuse_for(
                tensor._spec,
                func,
                f"of a {what} that requires grad would silently get no gradient; for a value "
                "to look at, call it under torch.no_grad() or on .detach()",
            )


def _accumulator(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _exact(tensor: torch.Tensor) -> torch.dtype:
    """In which powers of norms are added up, so that the split over ranks costs no precision."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


# ---- norms ----


@handles(aten._foreach_norm.Scalar)
def foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of a list of tensors: one collective for each group among them."""
    names = ("tensors", "ord", "dtype")
    given = {"ord": 2, "dtype": None, **kwargs, **dict(zip(names, args, strict=False))}
    return norms(func, args[0], float(given["ord"]), given["dtype"])


@handles(aten._foreach_powsum.Scalar)
def foreach_powsum(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of powers of absolute values, of a list of tensors."""
    names = ("tensors", "ord", "dtype")
    given = {"ord": 2, "dtype": None, **kwargs, **dict(zip(names, args, strict=False))}
    order = float(given["ord"])
    if not math.isfinite(order) or order == 0:
        refuse(func, args, kwargs)
    wide = norms(func, args[0], order, torch.float64)
    dtypes = [given["dtype"] or tensor.dtype for tensor in args[0]]
    return [value.pow(order).to(dtype) for value, dtype in zip(wide, dtypes, strict=True)]


def norms(
    func: OpOverload, tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The norm of every tensor of a list, of which some may be plain.

    Args:
        func: For messages.
        tensors: On any devices, of any floating dtypes.
        order: Any number, infinities included.
        dtype: Of the results; each tensor's own if None.
    """
    _refuse_gradient(tensors, func)
    results: list[torch.Tensor | None] = [None] * len(tensors)
    together: dict[tuple[Group, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, ShardedTensor):
            results[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
            continue
        if not tensor.dtype.is_floating_point:
            refuse_for(tensor._spec, func, f"is not supported for {tensor.dtype}")
        together.setdefault((group_of(tensor._spec), tensor.device), []).append(index)
    for (group, _), indices in together.items():
        pieces = [tensors[i]._local for i in indices]  # type: ignore[attr-defined]
        values = _combine(_local_norms(pieces, order), order, group)
        dtypes = [dtype or tensors[index].dtype for index in indices]
        # One conversion for each dtype, not for each tensor.
        columns = {wanted: values.to(wanted).unbind() for wanted in dict.fromkeys(dtypes)}
        for place, (index, wanted) in enumerate(zip(indices, dtypes, strict=True)):
            results[index] = columns[wanted][place]
    return [result for result in results if result is not None]


def _local_norms(pieces: list[torch.Tensor], order: float) -> torch.Tensor:
    """1-D, the norm of every piece; an empty piece has the norm that changes nothing."""
    exact = _exact(pieces[0])
    held = [k for k, piece in enumerate(pieces) if piece.numel()]
    wide = [k for k in held if pieces[k].dtype == torch.float64]
    narrow = [k for k in held if pieces[k].dtype != torch.float64]
    results: dict[int, torch.Tensor] = {}
    for some, dtype in ((wide, torch.float64), (narrow, torch.float32)):
        if some:
            found = torch._foreach_norm([pieces[k] for k in some], order, dtype=dtype)
            results.update(zip(some, found, strict=True))
    if wide and narrow:  # else they are converted together
        results = {k: result.to(exact) for k, result in results.items()}
    dtype = results[held[0]].dtype if held else exact
    # Empty pieces share one number: places of a list on a GPU would make the host wait.
    nothing = pieces[0].new_full((), math.inf if order < 0 else 0.0, dtype=dtype)
    return torch.stack([results.get(k, nothing) for k in range(len(pieces))]).to(exact)


def _combine(values: torch.Tensor, order: float, group: Group) -> torch.Tensor:
    """Local norms to whole norms, with one collective."""
    if group is None:
        return values
    if math.isinf(order):
        sign = math.copysign(1, order)
        return all_reduce_max(values * sign, group) * sign
    if order == 0:
        return all_reduce(values, "sum", group)
    return all_reduce(values.pow(order), "sum", group).pow(1 / order)


@handles(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
)
def norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The norm of one tensor over all of its dimensions."""
    given = _given(func, args, kwargs)
    tensor = given["self"]
    if tensor._spec.whole and _reduces_some(tensor, given.get("dim")):
        return owned.run(func, args, kwargs)
    _require_all_dims(tensor, given.get("dim"), func)
    order = given.get("ord", given.get("p"))
    order = 2.0 if order is None else float(order)
    result = norms(func, [tensor], order, given.get("dtype"))[0]
    return result.reshape((1,) * tensor.dim()) if given.get("keepdim") else result


def _given(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**kwargs, **dict(zip(names, args, strict=False))}


def _reduces_some(tensor: ShardedTensor, dim: Any) -> bool:
    """Whether some dimensions are left."""
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    distinct = {d % max(1, tensor.dim()) for d in dims}
    return bool(dims) and len(distinct) != tensor.dim()


def _require_all_dims(tensor: ShardedTensor, dim: Any, func: OpOverload) -> None:
    if _reduces_some(tensor, dim):
        refuse_for(tensor._spec, func, "reduces some of its dimensions only")


# ---- sums, extremes, truth ----


@handles(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def add_up(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum or mean of all elements."""
    given = _given(func, args, kwargs)
    tensor = given["self"]
    _refuse_gradient([tensor], func)
    if tensor._spec.whole and _reduces_some(tensor, given.get("dim")):
        return owned.run(func, args, kwargs)
    _require_all_dims(tensor, given.get("dim"), func)
    mean = func._schema.name == "aten::mean"
    if mean and not (tensor.is_floating_point() or given.get("dtype")):
        refuse_for(tensor._spec, func, f"is not defined for {tensor.dtype} without a dtype")
    dtype = given.get("dtype")
    if dtype is None:
        real = tensor.is_floating_point() or tensor.is_complex()
        dtype = tensor.dtype if real else torch.int64
    result = _sum(tensor._local, dtype, tensor._spec)
    if mean:
        result = result / tensor.numel()
    keep = (1,) * tensor.dim() if given.get("keepdim") else ()
    return result.to(dtype).reshape(keep)


def _sum(local: torch.Tensor, dtype: torch.dtype, spec: Spec) -> torch.Tensor:
    wide = dtype
    if dtype.is_floating_point:
        wide = _accumulator(local) if dtype != torch.float64 else dtype
        exact = _exact(local)
        return all_reduce(local.sum(dtype=wide).to(exact), "sum", group_of(spec))
    return all_reduce(local.sum(dtype=wide), "sum", group_of(spec))


@handles(aten.dot.default, aten.vdot.default)
def dot(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dot product of two 1-D tensors."""
    _refuse_gradient(args, func)
    spec = first_spec(args, kwargs)
    if args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
        refuse_for(spec, func, "needs two tensors of the same shape and dtype")
    mine, other = (local_operand(value, spec, func) for value in args)
    if func is aten.vdot.default:
        mine = mine.conj_physical() if mine.is_complex() else mine
    return _sum(mine * other, mine.dtype, spec).to(mine.dtype)


@handles(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
def extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest element; NaN if there is one."""
    given = _given(func, args, kwargs)
    tensor = given["self"]
    _refuse_gradient([tensor], func)
    if tensor._spec.whole and _reduces_some(tensor, given.get("dim")):
        return owned.run(func, args, kwargs)
    _require_all_dims(tensor, given.get("dim"), func)
    if not tensor.numel() or tensor.is_complex():
        refuse_for(tensor._spec, func, "needs at least one real element")
    largest = "max" in func._schema.name
    keep = (1,) * tensor.dim() if given.get("keepdim") else ()
    return _extreme(tensor, largest).to(tensor.dtype).reshape(keep)


def _extreme(tensor: ShardedTensor, largest: bool) -> torch.Tensor:
    local, group = tensor._local, group_of(tensor._spec)
    # What every backend reduces, and exactly.
    wide = torch.int64
    if local.is_floating_point():
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    if local.numel():
        value = (local.max() if largest else local.min()).to(wide)
    else:
        info = torch.finfo(wide) if wide.is_floating_point else torch.iinfo(wide)
        ends = (-math.inf, math.inf) if wide.is_floating_point else (info.min, info.max)
        value = local.new_full((), ends[0] if largest else ends[1], dtype=wide)
    # Bitwise complement turns integers around without overflow, as negation does for floats.
    turn = (
        (lambda v: v) if largest else (torch.neg if wide.is_floating_point else torch.bitwise_not)
    )
    return turn(all_reduce_max(turn(value).reshape(1), group))


@handles(aten.any.default, aten.all.default, aten.any.dims, aten.all.dims)
def truth(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether any or all elements are true."""
    given = _given(func, args, kwargs)
    tensor = given["self"]
    _require_all_dims(tensor, given.get("dim"), func)
    some = "any" in func._schema.name
    value = (tensor._local.any() if some else tensor._local.all()).to(torch.int32)
    result = all_reduce(value, "max" if some else "min", group_of(tensor._spec)).to(torch.bool)
    return result.reshape((1,) * tensor.dim()) if given.get("keepdim") else result


@handles(aten.count_nonzero.default)
def count_nonzero(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many elements are not zero."""
    given = _given(func, args, kwargs)
    tensor = given["self"]
    _require_all_dims(tensor, given.get("dim"), func)
    return all_reduce(torch.count_nonzero(tensor._local), "sum", group_of(tensor._spec))


@handles(aten.equal.default)
def equal(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors have the same shape and elements, on all ranks alike."""
    spec = first_spec(args, kwargs)
    if args[0].shape != args[1].shape:
        return False
    mine, other = (
        spec.piece(value)
        if not isinstance(value, ShardedTensor)
        else local_operand(value, spec, func)
        for value in args
    )
    same = torch.full((1,), int(torch.equal(mine, other)), dtype=torch.int32, device=mine.device)
    return bool(all_reduce(same, "min", group_of(spec)).item())


@handles(aten.allclose.default)
def allclose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """As `torch.allclose`, on all ranks alike."""
    with torch.no_grad():
        return bool(torch.isclose(*args, **kwargs).all().item())


# ---- gradient scaler ----


@handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscales the pieces; all ranks learn if one of them found inf or NaN."""
    gradients, found_inf, inverse_scale = args
    func([getattr(g, "_local", g) for g in gradients], found_inf, inverse_scale)
    specs = [g._spec for g in gradients if isinstance(g, ShardedTensor)]
    for group in dict.fromkeys(map(group_of, specs)):
        found_inf.copy_(all_reduce(found_inf.clone(), "max", group))
