"""Sharding a parameter in place: the object that the user made becomes the sharded parameter.

So ties, lists, weak references and optimizers that hold it go on holding the model's parameter.
`torch.utils.swap_tensors` does the same but refuses objects with weak references, which would
follow the object here as they should.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdpx.parameter.tensor import ShardedTensor
from fsdpx.torch_private import swap_content, swap_values, tensor_use_count

_COPIED = "_fsdpx_copied"


class Traits(NamedTuple):
    """What a parameter was besides its value; the full parameter that forward reads has it again.

    Attributes:
        kind: Its class.
        attributes: What the user hung on it.
        hooks: From `register_hook`, by handle.
    """

    kind: type[nn.Parameter]
    attributes: dict[str, Any]
    hooks: Any

    def give_to(self, leaf: nn.Parameter) -> None:
        """Makes `leaf` the same kind of parameter."""
        if self.kind is not nn.Parameter:
            leaf.__class__ = self.kind
        leaf.__dict__.update(self.attributes)
        if self.hooks:
            leaf._backward_hooks = self.hooks


def traits_of(parameter: nn.Parameter) -> Traits:
    """To be asked before the parameter is sharded."""
    hooks = parameter._backward_hooks
    return Traits(type(parameter), dict(parameter.__dict__), hooks)


def take_over(parameter: nn.Parameter, made: ShardedTensor) -> ShardedTensor:
    """Gives `parameter` the content of `made`, and `made` the old one.

    Attributes, the gradient (this rank's piece of it) and hooks that run after accumulation stay.

    Returns:
        `parameter`, which is a `ShardedTensor` now.
    """
    if parameter.requires_grad and tensor_use_count(parameter) > 1:
        _poison(parameter, made._spec.name, "fully_shard")
    attributes, gradient = dict(parameter.__dict__), parameter.grad
    after = parameter._post_accumulate_grad_hooks
    if gradient is not None:
        piece = made._spec.piece(gradient.detach()).to(made.device, copy=True)
        made.grad = ShardedTensor(piece, made._spec)
        parameter.grad = None
    made.__dict__.update(attributes)
    swap_content(parameter, made)
    ShardedTensor.num_taken_over += 1
    sharded: Any = parameter
    if after:
        sharded._post_accumulate_grad_hooks = after
    return sharded  # type: ignore[no-any-return]


def fill(parameter: ShardedTensor, value: torch.Tensor) -> None:
    """Gives a sharded parameter the values of a whole or equally sharded tensor.

    Unlike `copy_` also one on the meta device, which is on the value's device then.
    """
    if not parameter.is_meta or value.is_meta:
        parameter.copy_(value)
        return
    spec = parameter._spec
    local = torch.empty(spec.end - spec.begin, dtype=value.dtype, device=value.device)
    made = ShardedTensor(local, spec, parameter.requires_grad)
    made.detach().copy_(value)
    with keep_attributes([parameter]):
        swap_content(parameter, made)


def convert_leaf(leaf: nn.Parameter, made: nn.Parameter, name: str) -> None:
    """Gives the full parameter `leaf` the values of `made`, which have another dtype; whoever holds
    it goes on holding the unit's, and its attributes and hooks stay.
    """
    hooks = leaf._backward_hooks
    if leaf.requires_grad:
        _poison(leaf, name, "it was converted")
    swap_values(leaf, made)
    leaf._backward_hooks = hooks


@contextlib.contextmanager
def keep_attributes(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, `torch.nn.Module._apply` may swap sharded parameters for new ones; what hangs on
    them (attributes, hooks after accumulation) stays.
    """
    ours = [p for p in parameters if isinstance(p, ShardedTensor)]
    before = [(dict(p.__dict__), p._post_accumulate_grad_hooks) for p in ours]
    yield
    for parameter, (attributes, hooks) in zip(ours, before, strict=True):
        for key in ("_local", "_spec"):
            attributes.pop(key)
        parameter.__dict__.update(attributes)
        if hooks and not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = hooks


def _poison(parameter: nn.Parameter, name: str, event: str) -> None:
    """A graph of an earlier forward holds the old content: its gradients would go nowhere."""

    def refuse(gradients: object) -> None:
        raise RuntimeError(
            f"fsdpx: a backward reaches parameter {name!r} as it was before {event}: run the "
            "forward after that"
        )

    torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)


def mark_copied(parameter: nn.Parameter, name: str) -> None:
    """Notes that the values of `parameter` went into the sharded parameter `name`, not it."""
    parameter.__dict__[_COPIED] = name


def copied_into(parameter: torch.Tensor) -> str | None:
    """What `mark_copied` noted."""
    return parameter.__dict__.get(_COPIED)
