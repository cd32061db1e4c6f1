"""Sharded parameters: tensors that look whole and hold this rank's piece.

`ShardedTensor` is the tensor class, `Spec` says which elements a rank holds. Importing this package
makes torch's optimizers and gradient clipping treat `ShardedTensor` as an ordinary tensor class.
"""

from __future__ import annotations

import torch

# These three fill the operator table.
from fsdpx.parameter import elementwise, foreach, reductions
from fsdpx.parameter.spec import Spec, boxes, rebuild_spec
from fsdpx.parameter.tensor import ShardedTensor, rebuild_tensor

__all__ = ["ShardedTensor", "Spec", "boxes", "register"]

_FILL_THE_TABLE = (elementwise, foreach, reductions)


def register() -> None:
    """Makes torch accept `ShardedTensor`; done at import, and harmless when repeated.

    Without it optimizers and `clip_grad_norm_` go tensor by tensor (one collective for each), and
    `torch.load` with ``weights_only=True`` refuses saved parameters.
    """
    # `torch.optim.optimizer` is deleted as an attribute, so the lists are imported by name.
    from torch.optim.optimizer import _foreach_supported_types as optimizer_types
    from torch.utils._foreach_utils import _foreach_supported_types as utility_types

    for types in (optimizer_types, utility_types):
        if ShardedTensor not in types:
            types.append(ShardedTensor)  # type: ignore[arg-type]
    torch.serialization.add_safe_globals([rebuild_tensor, rebuild_spec])


register()
