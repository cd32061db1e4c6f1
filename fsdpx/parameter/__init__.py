"""Sharded parameters: tensors that look whole and hold this rank's piece.

`ShardedTensor` is the tensor class, `Spec` says which elements a rank holds. Importing this package
makes torch's optimizers and gradient clipping treat `ShardedTensor` as an ordinary tensor class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

# These three fill the operator table.
from fsdpx.parameter import elementwise, foreach, reductions, state_dicts
from fsdpx.parameter.identity import Traits, take_over, traits_of
from fsdpx.parameter.spec import Spec, boxes, rebuild_spec
from fsdpx.parameter.tensor import ShardedTensor, rebuild_tensor
from fsdpx.torch_private import leave_to_eager

__all__ = ["ShardedTensor", "Spec", "Traits", "boxes", "register", "take_over", "traits_of"]

_FILL_THE_TABLE = (elementwise, foreach, reductions)
_hooks: list[RemovableHandle] = []


def register() -> None:
    """Makes torch accept `ShardedTensor`; done at import, and harmless when repeated.

    Otherwise optimizers and `clip_grad_norm_` would go tensor by tensor (a collective for each),
    `torch.load` with ``weights_only=True`` would refuse saved parameters, distributed checkpoints
    would take pieces for whole values, and a compiled optimizer step would not count as a write.
    """
    # `torch.optim.optimizer` is deleted as an attribute, so the lists are imported by name.
    from torch.optim.optimizer import _foreach_supported_types as optimizer_types
    from torch.utils._foreach_utils import _foreach_supported_types as utility_types

    for types in (optimizer_types, utility_types):
        if ShardedTensor not in types:
            types.append(ShardedTensor)  # type: ignore[arg-type]
    torch.serialization.add_safe_globals([rebuild_tensor, rebuild_spec])
    state_dicts.install()
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Compiled kernels write to pieces behind the back of everything that counts writes.
    if torch.compiler.is_compiling():
        _count_writes(optimizer)


def _count_writes(optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    increment_version([p._local for p in parameters if isinstance(p, ShardedTensor)])


leave_to_eager(_count_writes)


register()
