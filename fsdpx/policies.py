"""What a user decides about a unit: precision and where its shard lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which a unit computes and communicates; the optimizer always sees the original
    dtype.

    Only floating parameters and tensors are affected.

    Attributes:
        param_dtype: Dtype of the gathered parameters, and so of the computation. None: as they are.
        reduce_dtype: Dtype in which gradients are accumulated over backwards without
            synchronisation, and an upper bound for what travels. Sums over ranks are always taken
            in at least fp32. None: the gradients' own dtype.
        output_dtype: Dtype to which floating outputs of the unit's forward are cast. None: no cast.
        cast_forward_inputs: Whether floating inputs of the unit's forward are cast to
            `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _FLOATING:
                known = ", ".join(str(d) for d in _FLOATING)
                raise ValueError(f"MixedPrecisionPolicy.{name} must be one of {known}; got {dtype}")

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gathered dtype of a parameter of `dtype`."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype

    def accumulate_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter of `dtype` are added up."""
        if not dtype.is_floating_point:
            return dtype
        return self.reduce_dtype or self.compute_dtype(dtype)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradients of one backward travel: the narrower of the two."""
        compute, reduce = self.compute_dtype(dtype), self.accumulate_dtype(dtype)
        return compute if compute.itemsize <= reduce.itemsize else reduce


_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: shards stay on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in CPU memory; the ranks compute on GPUs.

    The optimizer runs on the CPU. Forwards and backwards return when their last gather, and
    backwards when their last gradient, has crossed the bus.

    Attributes:
        pin_memory: Whether that memory is pinned. Otherwise each copy makes the host wait.
    """

    pin_memory: bool = True
