"""The two states of a unit, and the moves between them."""

from __future__ import annotations

import enum


class Storage(enum.Enum):
    """Where a unit's full parameters are."""

    SHARDED = enum.auto()  # nowhere
    GATHERING = enum.auto()  # their all-gather has been issued
    GATHERED = enum.auto()  # attached: views of them can be read

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python


class Phase(enum.Enum):
    """What the training step does with a unit."""

    IDLE = enum.auto()
    FORWARD = enum.auto()  # its forward runs (also when recomputed in backward)
    BACKWARD = enum.auto()  # backward reads it; its gradients are not complete

    __hash__ = object.__hash__


LEGAL_MOVES = {
    (Storage.SHARDED, Storage.GATHERING),
    (Storage.GATHERING, Storage.GATHERED),
    (Storage.GATHERING, Storage.SHARDED),
    (Storage.GATHERED, Storage.SHARDED),
    (Phase.IDLE, Phase.FORWARD),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.FORWARD, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.FORWARD),
    (Phase.BACKWARD, Phase.IDLE),
}
