"""This rank's share of a unit: one flat tensor per segment, and the parameters that view it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .layout import UnitLayout
from .mesh import ShardGroup
from .parameter import ShardedTensor, Spec, Traits, take_over, traits_of
from .policies import CPUOffloadPolicy


@dataclass
class Managed:
    """One parameter of a unit.

    Attributes:
        name: As seen from the unit's module.
        original: The parameter before sharding, or a sharded one to copy; None once it is sharded.
        owners: Every (module, attribute) that holds it.
        sharded: What `module.parameters()` yields; the same object as the original.
        attributes: The `__dict__` of `sharded`: another one once `Module._apply` has replaced it.
        traits: What the original was besides its value.
        leaf: The full parameter: a permanent view of the unit's storage.
        watched: Whether its gradients are counted.
        whole: Whether one rank holds all of it.
    """

    name: str
    original: nn.Parameter | ShardedTensor | None
    owners: list[tuple[nn.Module, str]]
    sharded: ShardedTensor = field(init=False)
    attributes: dict[str, Any] = field(init=False)
    traits: Traits = field(init=False)
    leaf: nn.Parameter = field(init=False)
    watched: bool = False
    whole: bool = False

    def twin(self) -> Managed:
        """A copy of the parameter for a copy of its unit, not yet sharded and without owners."""
        source = self.sharded
        original = ShardedTensor(source._local, source._spec, source.requires_grad)
        original._is_param = True
        made = Managed(self.name, original, [], whole=self.whole)
        made.traits = self.traits
        return made


def contents_of(parameters: Iterable[Managed]) -> int:
    """A hash that ranks compare at each gather, so that no two of them train different models."""
    rows = [(m.name, tuple(m.leaf.shape), m.leaf.requires_grad) for m in parameters]
    return int.from_bytes(hashlib.blake2b(repr(rows).encode(), digest_size=8).digest())


class Shards:
    """The flat shards of a unit on this rank.

    Attributes:
        flat: One 1-D tensor per segment, `shard_numel` elements of the original dtype.
        sharded: The parameters that view them.
        device: Where they are (and their gradients).
    """

    def __init__(
        self,
        parameters: Sequence[Managed],
        layout: UnitLayout,
        group: ShardGroup,
        device: torch.device,
        offload: CPUOffloadPolicy | None,
    ) -> None:
        self._parameters = parameters
        self._layout = layout
        self._group = group
        offload = offload if device.type != "cpu" else None
        self.device = torch.device("cpu") if offload else device
        self._pinned = offload is not None and offload.pin_memory
        self._earlier = 0  # generation of shards that `rehome` has replaced
        self.flat = self._make_flat(self._device_of_originals())
        self._take_originals()
        self.sharded = [managed.sharded for managed in parameters]
        self._pieces = [managed.sharded._local for managed in parameters]
        for managed in parameters:
            managed.attributes = managed.sharded.__dict__

    def _device_of_originals(self) -> torch.device:
        on_meta = [managed.name for managed in self._parameters if original_of(managed).is_meta]
        if on_meta and len(on_meta) < len(self._parameters):
            raise ValueError(
                f"fully_shard: parameter '{on_meta[0]}' is on the meta device, though others of "
                "its unit are not: initialise it first, or the whole unit after sharding"
            )
        return torch.device("meta") if on_meta else self.device

    def _make_flat(self, device: torch.device) -> list[torch.Tensor]:
        """One zeroed flat shard per segment."""
        return [self._empty(number, device).zero_() for number in range(len(self._layout.segments))]

    def empty(self, number: int) -> torch.Tensor:
        """Memory like that of a segment's flat shard, for its gradients."""
        return self._empty(number, self.device)

    def _empty(self, number: int, device: torch.device) -> torch.Tensor:
        segment = self._layout.segments[number]
        dtype: Any = segment.dtype
        pinned = self._pinned and device.type == "cpu"
        return torch.empty(segment.shard_numel, dtype=dtype, device=device, pin_memory=pinned)

    def _take_originals(self) -> None:
        """Keeps this rank's piece of every parameter and lets the originals go."""
        with torch.no_grad():
            for index, managed in enumerate(self._parameters):
                original, piece = original_of(managed), self._piece(index)
                if isinstance(original, ShardedTensor):
                    piece.copy_(original.to_local())
                    original._local, managed.sharded = piece, original
                else:
                    self._take(index, original, piece)
                managed.original = None

    def _take(self, index: int, original: nn.Parameter, piece: torch.Tensor) -> None:
        managed, rank = self._parameters[index], self._group.rank
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

    @property
    def were_replaced(self) -> bool:
        """Whether `Module._apply` (`to()`, `to_empty()`) has given a parameter new content; it may
        be equal.
        """
        for managed in self._parameters:  # no generator: every forward asks
            if managed.sharded.__dict__ is not managed.attributes:
                return True
        return False

    def first_moved(self) -> Managed | None:
        """The first parameter whose piece is no longer a view of the flat shards."""
        if not self.were_replaced:
            return None
        for managed, piece in zip(self._parameters, self._pieces, strict=True):
            if managed.sharded._local is not piece:
                return managed
        return None

    def keep_attributes(self) -> None:
        """Gives replaced parameters what hung on them before."""
        for managed in self._parameters:
            now = managed.sharded.__dict__
            if now is not managed.attributes:
                now.update({k: v for k, v in managed.attributes.items() if k not in now})
                managed.attributes = now

    def check_moved(self, unit: str) -> None:
        """Raises if a piece is where shards can't follow.

        Args:
            unit: The unit's name, for the message.
        """
        for managed in self._parameters:
            self._check_moved(unit, managed)

    def rehome(self, layout: UnitLayout) -> None:
        """Makes new flat shards of pieces that were replaced.

        Args:
            layout: Cut alike; its dtypes are the pieces'.
        """
        self._layout = layout
        self._earlier = self.generation + 1
        with torch.no_grad():
            self.flat = self._make_flat(self.device)
            for index, managed in enumerate(self._parameters):
                piece = self._piece(index)
                piece.copy_(managed.sharded._local)
                managed.sharded._local = piece
        self._pieces = [managed.sharded._local for managed in self._parameters]

    def _check_moved(self, unit: str, managed: Managed) -> None:
        local = managed.sharded.to_local()
        where = f"fsdpx: parameter '{managed.name}' of unit '{unit}'"
        if local.is_complex():
            raise RuntimeError(
                f"{where} was converted to {local.dtype}: complex parameters are not supported"
            )
        if local.is_meta:
            raise RuntimeError(
                f"{where} is on the meta device: call model.to_empty(device=...) and initialise "
                "all parameters of the unit"
            )
        if local.device != self.device:
            raise RuntimeError(
                f"{where} was moved to {local.device} after fully_shard; the unit's shards are on "
                f"{self.device}, by its mesh or by CPU offload: leave them there, and move buffers "
                "one by one"
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
