"""ZeRO stages: what a unit keeps gathered, and which backwards reduce its gradients.

| stage | parameters | gradients |
|---|---|---|
| 1 | gathered once for each change of the weights | full until the last micro-batch |
| 2 | gathered once for each change of the weights | reduced in every backward |
| 3 | gathered for each forward and each backward | reduced in every backward |

Optimizer state is sharded in all of them. Source: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (1, 2, 3)


@dataclass
class ZeroPolicy:
    """A unit's stage, and what the user has set since.

    Attributes:
        stage: 1, 2 or 3.
        reshard_after_forward: Free the full parameters between forward and backward; None: as the
            stage wants.
        reshard_after_backward: The same, between backward and the next forward.
        requires_gradient_sync: False: backwards add gradients up on each rank.
        requires_all_reduce: False: backwards reduce over the ranks that share the unit, not over
            replicas (HSDP).
        is_last_backward: False: more micro-batches follow before the optimizer steps.
    """

    stage: int
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool | None = None
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_last_backward: bool = True

    def keeps_after_forward(self, is_root: bool) -> bool:
        """Whether the unit stays gathered from its forward to its backward."""
        if self.reshard_after_forward is not None:
            return not self.reshard_after_forward
        return self.stage < 3 or is_root

    @property
    def keeps_after_backward(self) -> bool:
        """Whether the unit stays gathered until its weights change."""
        if self.reshard_after_backward is not None:
            return not self.reshard_after_backward
        return self.stage < 3

    @property
    def reduces_now(self) -> bool:
        """Whether a backward reduces gradients, or adds them up on this rank."""
        return self.requires_gradient_sync and (self.is_last_backward or self.stage > 1)

    @property
    def reduces_over_replicas_now(self) -> bool:
        return self.reduces_now and self.requires_all_reduce
