"""Equal parameters and buffers on all ranks: taken from the first one, or compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .mesh import ShardGroup, resolve_mesh
from .parameter import ShardedTensor, collectives


def sync_module_states(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Overwrites a module's parameters and buffers by those of the first rank; collective.

    Call it before `fully_shard` where ranks may have initialised differently: each rank keeps a
    piece of its own values, so pieces of different models would mix.

    Args:
        module: All ranks have the same names, shapes and dtypes.
        mesh: As for `fully_shard`.

    Raises:
        ValueError: For a parameter that is sharded already, or on the meta device.
    """
    ranks, device = resolve_mesh(mesh, "auto", module.parameters())
    states = [*module.named_parameters(), *module.named_buffers()]
    for name, state in states:
        if isinstance(state, ShardedTensor):
            raise ValueError(
                f"sync_module_states: parameter '{name}' is sharded already, so the first rank no "
                "longer has its whole value: call sync_module_states before fully_shard"
            )
    broadcast_states(states, ranks, device)


def broadcast_states(
    states: Iterable[tuple[str, torch.Tensor]], ranks: ShardGroup, device: torch.device
) -> None:
    """Overwrites plain tensors by those of the first rank among all that share or hold copies.

    Args:
        states: By name; on any devices.
        ranks: All of them.
        device: On which the ranks' groups can communicate.
    """
    values = []
    for name, state in states:
        if state.is_meta:
            raise ValueError(f"sync_module_states: '{name}' is on the meta device: give it values")
        values.append(state.detach())
    # Copies first: then the first rank of each group that shares has the first rank's values.
    collectives.broadcast_from_first(values, ranks.replicate_group, device)
    collectives.broadcast_from_first(values, ranks.process_group, device)


def unequal_states(module: nn.Module, mesh: DeviceMesh | None = None) -> list[str]:
    """The parameters and buffers that ranks should hold alike and do not; collective.

    Before sharding that is all of them; after it, buffers, ignored parameters, and, where the
    mesh has replicas, the ranks' pieces of sharded parameters.

    Args:
        module: All ranks have the same names.
        mesh: As for `fully_shard`.

    Returns:
        Their names, the same on all ranks; bits are compared.
    """
    ranks, _ = resolve_mesh(mesh, "auto")
    whole: dict[str, bytes] = {}
    pieces: dict[str, bytes] = {}
    states = dict([*module.named_parameters(), *module.named_buffers()])
    for name, state in states.items():
        if isinstance(state, ShardedTensor):
            pieces[name] = _digest(state.to_local())
        else:
            whole[name] = _digest(state)
    everywhere = {**pieces, **whole}
    unequal = _unequal(everywhere, collectives.gather_objects(everywhere, ranks.replicate_group))
    unequal |= _unequal(whole, collectives.gather_objects(whole, ranks.process_group))
    # What one column of the mesh found, others must learn.
    found = collectives.gather_objects(sorted(unequal), ranks.process_group)
    names = {name for each in found for name in each}
    return [name for name in states if name in names]


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.cpu().numpy().tobytes(), digest_size=16).digest()


def _unequal(mine: dict[str, bytes], everyones: list[dict[str, bytes]]) -> set[str]:
    return {name for name in mine if any(theirs.get(name) != mine[name] for theirs in everyones)}
