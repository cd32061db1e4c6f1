"""Operators that act element by element: on the pieces, without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from fsdpx.parameter import owned
from fsdpx.parameter.operands import UNSHARDED_TARGET, local_operand
from fsdpx.parameter.spec import Spec
from fsdpx.parameter.table import Handler, family, handles
from fsdpx.parameter.tensor import ShardedTensor, first_spec, refuse, refuse_for

aten = torch.ops.aten

# An explicit list: torch's own tag "pointwise" is also on operators that are not (`equal`), and a
# newer torch may tag more. Overloads must carry the tag too.
_POINTWISE = """
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
    clamp_max clamp_min clone conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc
    erfinv exp exp2 expm1 floor fmax fmin fmod frac frexp gcd ge gelu gelu_backward gt hardshrink
    hardsigmoid hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf
    lcm le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit logit_backward lt masked_fill maximum minimum mish mul mvlgamma
    nan_to_num native_dropout_backward ne neg nextafter polygamma positive pow rad2deg reciprocal
    relu relu6 remainder round rsqrt rsub selu sgn sigmoid sigmoid_backward sign signbit silu
    silu_backward sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e
    special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py special_zeta sqrt square sub tan tanh tanh_backward threshold
    threshold_backward trunc where xlogy
"""
POINTWISE = frozenset(_POINTWISE.split())

# Element-wise as well, but without the tag.
_UNTAGGED = """
    _pin_memory _to_copy empty_like fill fill_ full_like isclose masked_fill_ ones_like zero zero_
    zeros_like
"""
UNTAGGED = frozenset(_UNTAGGED.split())

# Results keep the elements' order in memory, whatever format is asked for.
_FORMAT = "memory_format"


@family
def _elementwise(func: OpOverload) -> Handler | None:
    name = func._schema.name.removeprefix("aten::")
    tagged = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    known = name in POINTWISE or (name.endswith("_") and name[:-1] in POINTWISE)
    # torch.compile makes fma of addcmul and addcdiv.
    if not (tagged and known) and name not in UNTAGGED and name != "prims::fma":
        return None
    if not func._schema.is_mutable:
        return functional
    return in_place if func._schema.arguments[0].alias_info else into


def functional(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that makes a new value on the pieces of its operands."""
    if first_spec(args, kwargs).whole and _broadcasts(args):
        return owned.run(func, args, kwargs)
    spec = first_spec(args, kwargs)
    if _FORMAT in kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key != _FORMAT}
    result = _run(func, spec, args, kwargs)
    if isinstance(result, torch.Tensor):
        return ShardedTensor(result, spec)
    return tuple(ShardedTensor(part, spec) for part in result)


def _broadcasts(args: tuple[Any, ...]) -> bool:
    """Whether operands that their owner has differ in shape, or one is owned."""
    tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim()]
    return any(type(t) is owned.OwnedTensor or t.shape != tensors[0].shape for t in tensors)


def in_place(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that changes its first operand."""
    target = args[0]
    if not isinstance(target, ShardedTensor):
        refuse_for(first_spec(args, kwargs), func, UNSHARDED_TARGET)
    _run(func, target._spec, args, kwargs)
    return target


def into(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that writes to its `out` arguments, which have any names."""
    targets = [kwargs[argument.name] for argument in func._schema.arguments if argument.is_out]
    if not all(isinstance(target, ShardedTensor) for target in targets):
        refuse_for(first_spec(args, kwargs), func, UNSHARDED_TARGET)
    _run(func, targets[0]._spec, args, kwargs)
    return targets[0] if len(targets) == 1 else tuple(targets)


ELEMENTWISE = (functional, in_place, into)


def _run(func: OpOverload, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not spec.shape:
        return _zero_dim(func, spec, args, kwargs)
    local = [
        value._local
        if type(value) is ShardedTensor and value._spec is spec  # the usual case, at once
        else local_operand(value, spec, func)
        for value in args
    ]
    if not kwargs:
        return func(*local)
    return func(*local, **{key: local_operand(value, spec, func) for key, value in kwargs.items()})


def _zero_dim(func: OpOverload, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `_run` for a parameter without dimensions.

    Such a tensor yields to others in type promotion, as a 1-D piece would not. So the operator runs
    without dimensions; where the one element lies elsewhere, on a stand-in that gives the dtype.
    """
    here = spec.end > spec.begin

    def operand(value: Any) -> Any:
        local = local_operand(value, spec, func)
        if not isinstance(value, ShardedTensor):
            return local
        return local.view(()) if here else local.new_ones(())

    result = func(*map(operand, args), **{key: operand(value) for key, value in kwargs.items()})
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    pieces = [part.reshape(1)[: spec.end - spec.begin] for part in parts]
    return pieces[0] if isinstance(result, torch.Tensor) else pieces


@handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another wrapper of the same piece."""
    return _view(args[0], args[0]._spec)


def _view(source: ShardedTensor, spec: Spec) -> ShardedTensor:
    local = source._local
    if type(local) is not torch.Tensor:
        return ShardedTensor(aten.alias.default(local), spec)  # traced: must be a new one
    # The same object, so that writes through the view count as writes to the flat shard.
    if torch.is_inference_mode_enabled() and not source.is_inference():
        # torch wants a view to be as ordinary as what it is a view of.
        with torch.inference_mode(False):
            return ShardedTensor(local, spec)
    return ShardedTensor(local, spec)


@handles(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def reshape(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same elements in another shape: pieces follow the elements' order, so they stay."""
    spec = args[0]._spec
    shape = func(torch.empty(spec.shape, device="meta"), *args[1:], **kwargs).shape
    return _view(args[0], spec.reshaped(shape))


@handles(aten.copy_.default)
def copy_(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies a whole (or broadcastable) or equally sharded value into the piece."""
    target, source, *rest = args
    if not isinstance(target, ShardedTensor):
        refuse_for(source._spec, func, UNSHARDED_TARGET)
    target._local.copy_(local_operand(source, target._spec, func), *rest, **kwargs)
    return target


_RANDOM = "normal_ uniform_ random_ exponential_ log_normal_ cauchy_ bernoulli_ geometric_"
_RANDOM_LIKE = "rand_like randn_like randint_like"


def _overloads(names: str) -> list[OpOverload]:
    packets = [getattr(aten, name) for name in names.split()]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


@handles(*_overloads(_RANDOM))
def fill_random(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the whole tensor and keeps the piece.

    With equal seeds on all ranks the result is the unsharded tensor's, and pieces do not repeat.
    """
    target, *rest = args
    if not isinstance(target, ShardedTensor) or any(isinstance(x, ShardedTensor) for x in rest):
        refuse(func, args, kwargs)
    whole = torch.empty(target._spec.shape, dtype=target.dtype, device=target.device)
    func(whole, *rest, **kwargs)
    target._local.copy_(target._spec.piece(whole))
    return target


@handles(*(op for op in _overloads(_RANDOM_LIKE) if "out" not in op._overloadname))
def random_like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `fill_random`, for a new tensor."""
    source, *rest = args
    if not isinstance(source, ShardedTensor):
        refuse(func, args, kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key != _FORMAT}
    whole = func(
        torch.empty(source._spec.shape, dtype=source.dtype, device=source.device), *rest, **kwargs
    )
    return ShardedTensor(source._spec.piece(whole).clone(), source._spec)


@handles(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
def new(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor: only dtype and device come from the sharded one.

    With one exception: the staging of asynchronous checkpoints asks for an empty tensor of the same
    shape on a given device and then fills it piece by piece.
    """
    source, shape = args[0], args[1]
    staging = func is aten.new_empty.default and kwargs.get("device") is not None
    if staging and tuple(shape) == tuple(source._spec.shape):
        local = source._local
        return ShardedTensor(func(local, local.shape, **kwargs), source._spec)
    if source._spec.whole and not source._is_param and func is not aten.new_empty_strided.default:
        return owned.new(func, source, args[1:], kwargs)
    return func(source._local, *args[1:], **kwargs)


@handles(aten.index_put_.default, aten.index_put.default)
def index_put(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = value`` for a mask that is sharded alike (or whole) and a single value."""
    target, indices, value, *rest = args
    mask = indices[0] if len(indices) == 1 else None
    if (
        not isinstance(target, ShardedTensor)
        or not isinstance(mask, torch.Tensor)
        or mask.dtype != torch.bool
        or mask.shape != target.shape
        or isinstance(value, ShardedTensor)
        or value.numel() != 1
    ):
        refuse(func, args, kwargs)
    chosen = local_operand(mask, target._spec, func).reshape(-1)
    if mask.dim() == 0 and not isinstance(mask, ShardedTensor):
        chosen = target._spec.piece(mask)
    result = func(target._local, (chosen,), value.reshape(()), *rest, **kwargs)
    return target if func is aten.index_put_.default else ShardedTensor(result, target._spec)


@handles(aten.is_pinned.default)
def is_pinned(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether the piece is in pinned memory."""
    return func(args[0]._local, *args[1:], **kwargs)


@handles(aten.record_stream.default)
def record_stream(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the piece's memory."""
    return func(args[0]._local, *args[1:], **kwargs)
