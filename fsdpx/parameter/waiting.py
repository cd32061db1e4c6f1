"""What `.grad` is while gradients are added up on this rank and wait for their reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from fsdpx.parameter.spec import Spec
from fsdpx.parameter.tensor import ShardedTensor, sharded_in

_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class WaitingGradient(ShardedTensor):
    """Stands for a gradient that no rank has yet: it can be dropped, or set to zero, not read.

    Attributes:
        before: What `.grad` was, to which the gradient will be added.
        is_zeroed: Whether what has waited so far counts as zeros.
        members: Of a flat parameter: those of the parameters in it.
    """

    before: torch.Tensor | None = None
    is_zeroed: bool = False
    members: Sequence[WaitingGradient] = ()

    @staticmethod
    def make(parameter: ShardedTensor) -> WaitingGradient:
        """What `.grad` of a parameter can be set to."""
        made: Any = ShardedTensor.__new__(WaitingGradient, parameter._local, parameter._spec)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        waiting = [t for t in sharded_in((args, kwargs)) if isinstance(t, WaitingGradient)]
        if func not in _ZEROING:
            _refuse(waiting[0]._spec)
        for gradient in waiting:
            gradient._zero()
        if isinstance(args[0], WaitingGradient):
            return args[0]
        others = [tensor for tensor in args[0] if not isinstance(tensor, WaitingGradient)]
        return func(others) if others else None

    def _zero(self) -> None:
        self.is_zeroed = True
        if self.before is not None:
            self.before.zero_()
        for member in self.members:
            member._zero()

    @property
    def _local(self) -> NoReturn:
        """What operators of other sharded tensors ask for."""
        _refuse(self._spec)

    @_local.setter
    def _local(self, value: torch.Tensor) -> None:
        """There is none."""

    def to_local(self) -> NoReturn:
        """Not there yet."""
        _refuse(self._spec)

    def full_tensor(self) -> NoReturn:
        """Not there yet."""
        _refuse(self._spec)

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        return f"WaitingGradient({self._spec.name!r}, shape={tuple(self._spec.shape)})"


def _refuse(spec: Spec) -> NoReturn:
    raise RuntimeError(
        f"fsdpx: the gradient of parameter {spec.name!r} is not there yet: it was added up without "
        "synchronisation (no_sync, set_requires_gradient_sync, set_is_last_backward, "
        "set_requires_all_reduce) and waits for a backward that reduces it. Run that before the "
        "optimizer steps, clips, or reads gradients, or drop it with zero_grad()"
    )
