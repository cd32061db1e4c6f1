"""This rank's share of a unit: one flat tensor per segment, and the parameters that view it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .layout import UnitLayout
from .mesh import ShardGroup
from .parameter import ShardedTensor, Spec, Traits, take_over, traits_of

_PIECE = operator.attrgetter("_local")


@dataclass
class Managed:
    """One parameter of a unit.

    Attributes:
        name: As seen from the unit's module.
        original: The parameter before sharding, or a sharded one to copy; None once it is sharded.
        owners: Every (module, attribute) that holds it.
        sharded: What `module.parameters()` yields; the same object as the original.
        traits: What the original was besides its value.
        leaf: The full parameter: a permanent view of the unit's storage.
        watched: Whether its gradients are counted.
        whole: Whether one rank holds all of it.
    """

    name: str
    original: nn.Parameter | ShardedTensor | None
    owners: list[tuple[nn.Module, str]]
    sharded: ShardedTensor = field(init=False)
    traits: Traits = field(init=False)
    leaf: nn.Parameter = field(init=False)
    watched: bool = False
    whole: bool = False

    def twin(self) -> Managed:
        """A copy of the parameter for a copy of its unit, not yet sharded and without owners."""
        source = self.sharded
        original = ShardedTensor(source.to_local(), source._spec, source.requires_grad)
        original._is_param = True
        made = Managed(self.name, original, [], whole=self.whole)
        made.traits = self.traits
        return made


class Shards:
    """The flat shards of a unit on this rank.

    Attributes:
        flat: One 1-D tensor per segment, `shard_numel` elements of the original dtype.
        parameters: The sharded ones, in the unit's order.
        device: Where they are (and their gradients).
    """

    def __init__(
        self,
        managed: Sequence[Managed],
        layout: UnitLayout,
        group: ShardGroup,
        device: torch.device,
    ) -> None:
        self._managed = managed
        self._layout = layout
        self._group = group
        self.device = device
        self._earlier = 0  # generation of shards that `rehome` has replaced
        self.flat = self._make_flat(self._device_of_originals())
        self._take_originals()
        self.parameters = [each.sharded for each in managed]
        self._pieces = list(map(_PIECE, self.parameters))

    def _device_of_originals(self) -> torch.device:
        on_meta = [managed.name for managed in self._managed if original_of(managed).is_meta]
        if on_meta and len(on_meta) < len(self._managed):
            raise ValueError(
                f"fully_shard: parameter '{on_meta[0]}' is on the meta device, though others of "
                "its unit are not: initialise it first, or the whole unit after sharding"
            )
        return torch.device("meta") if on_meta else self.device

    def _make_flat(self, device: torch.device) -> list[torch.Tensor]:
        """One zeroed flat shard per segment."""
        made = []
        for segment in self._layout.segments:
            dtype: Any = segment.dtype
            made.append(torch.zeros(segment.shard_numel, dtype=dtype, device=device))
        return made

    def _take_originals(self) -> None:
        """Keeps this rank's piece of every parameter and lets the originals go."""
        with torch.no_grad():
            for index, managed in enumerate(self._managed):
                original, piece = original_of(managed), self._piece(index)
                if isinstance(original, ShardedTensor):
                    piece.copy_(original.to_local())
                    original._local, managed.sharded = piece, original
                else:
                    self._take(index, original, piece)
                managed.original = None

    def _take(self, index: int, original: nn.Parameter, piece: torch.Tensor) -> None:
        managed, rank = self._managed[index], self._group.rank
        ranges = self._layout.ranges(index)
        begin, end = ranges[rank]
        if original.device.type != "meta":
            piece.copy_(original.detach().reshape(-1)[begin:end])
        shape, group = tuple(original.shape), self._group.process_group
        spec = Spec(managed.name, shape, ranges, rank, group, managed.whole)
        made = ShardedTensor(piece, spec, original.requires_grad)
        made._is_param = True
        managed.traits = traits_of(original)
        managed.sharded = take_over(original, made)

    def _piece(self, index: int) -> torch.Tensor:
        """This rank's piece of parameter `index`: a view of its segment's shard."""
        number, _ = self._layout.place(index)
        start, length = self._layout.local_slice(index, self._group.rank)
        return self.flat[number][start : start + length]

    @property
    def generation(self) -> int:
        """Moves with every in-place change and with `rehome`."""
        generation = self._earlier
        for flat in self.flat:
            generation += flat._version
        return generation

    def rehome(self, unit: str) -> bool:
        """Moves pieces that `Module._apply` replaced (`.to_empty()`, `.to()`) into new flat shards.

        Args:
            unit: The unit's name, for messages.

        Returns:
            Whether there were any.

        Raises:
            RuntimeError: A piece has another dtype, or is on another device.
        """
        if all(map(operator.is_, map(_PIECE, self.parameters), self._pieces)):
            return False
        for index, managed in enumerate(self._managed):
            self._check_replaced(unit, index, managed)
        self._earlier = self.generation + 1
        with torch.no_grad():
            self.flat = self._make_flat(self.device)
            for index, managed in enumerate(self._managed):
                piece = self._piece(index)
                piece.copy_(managed.sharded.to_local())
                managed.sharded._local = piece
        self._pieces = list(map(_PIECE, self.parameters))
        return True

    def _check_replaced(self, unit: str, index: int, managed: Managed) -> None:
        number, _ = self._layout.place(index)
        local = managed.sharded.to_local()
        expected = self._layout.segments[number].dtype
        if local.dtype != expected:
            raise RuntimeError(
                f"fsdpx: parameter '{managed.name}' of unit '{unit}' was converted from "
                f"{expected} to {local.dtype} after fully_shard: convert the model before "
                "wrapping it, or use MixedPrecisionPolicy(param_dtype=...)"
            )
        if local.is_meta:
            raise RuntimeError(
                f"fsdpx: parameter '{managed.name}' of unit '{unit}' is on the meta device: call "
                "model.to_empty(device=...) and initialise all parameters of the unit"
            )
        if local.device.type != self.device.type:
            raise RuntimeError(
                f"fsdpx: parameter '{managed.name}' of unit '{unit}' was moved to "
                f"{local.device} after fully_shard; the unit's mesh is on {self.device}"
            )


def original_of(managed: Managed) -> nn.Parameter | ShardedTensor:
    """The parameter before sharding."""
    assert managed.original is not None
    return managed.original


def take_edits(full: torch.Tensor, sharded: ShardedTensor) -> None:
    """Writes this rank's piece of a whole value to the sharded one, where they differ."""
    local = sharded.to_local()
    piece = sharded._spec.piece(full.detach()).to(local.device)
    # Only what was edited: the rest would lose what the dtype of `full` cannot hold.
    edited = piece != local.to(piece.dtype)
    if edited.any():
        local[edited] = piece[edited].to(local.dtype)
