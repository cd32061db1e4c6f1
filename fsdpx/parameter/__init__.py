"""Sharded parameters: tensors that look whole and hold this rank's piece.

`ShardedTensor` is the tensor class, `Spec` says which elements a rank holds. Importing this package
makes torch's optimizers and gradient clipping treat `ShardedTensor` as an ordinary tensor class.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

# These three fill the operator table.
from fsdpx.parameter import elementwise, foreach, optimizers, reductions, state_dicts
from fsdpx.parameter.identity import (
    Traits,
    convert_leaf,
    fill,
    keep_attributes,
    mark_copied,
    take_over,
    traits_of,
)
from fsdpx.parameter.spec import Spec, boxes, rebuild_spec
from fsdpx.parameter.tensor import ShardedTensor, rebuild_tensor
from fsdpx.parameter.waiting import WaitingGradient

__all__ = [
    "ShardedTensor",
    "Spec",
    "Traits",
    "WaitingGradient",
    "boxes",
    "convert_leaf",
    "fill",
    "keep_attributes",
    "mark_copied",
    "register",
    "take_over",
    "traits_of",
]

_FILL_THE_TABLE = (elementwise, foreach, reductions)
_hooks: list[RemovableHandle] = []


def register() -> None:
    """Makes torch accept `ShardedTensor`; done at import, and harmless when repeated.

    Otherwise optimizers and `clip_grad_norm_` would go tensor by tensor (a collective for each),
    `torch.load` with ``weights_only=True`` would refuse saved parameters, distributed checkpoints
    would take pieces for whole values, optimizers made before sharding would meet whole state, and
    a compiled optimizer step would not count as a write.
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
        _hooks.append(register_optimizer_step_pre_hook(optimizers.before_step))
        _hooks.append(register_optimizer_step_post_hook(optimizers.after_step))


register()
