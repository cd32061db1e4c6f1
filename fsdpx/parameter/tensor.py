"""`ShardedTensor`: looks like the whole parameter, holds this rank's piece of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch._ops import OpOverload

from fsdpx import _C
from fsdpx.parameter import collectives, table
from fsdpx.parameter.spec import Spec, rebuild_spec


class ShardedTensor(torch.Tensor):
    """One class for parameters, gradients and optimizer state.

    Shape, dtype and device are the whole tensor's; `to_local()` is this rank's piece, a 1-D view of
    its unit's flat shard. Element-wise operators act on the pieces; norms, sums and comparisons
    give the whole tensor's value on all ranks; every other operator is an error.

    A parameter is one whose `_is_param` is true: `isinstance(p, torch.nn.Parameter)` then holds.
    That is a flag and not a class of its own because `Module.to` swaps the classes of tensors.

    Every write through this class bumps the version counter of the piece, hence of the flat shard
    that it is a view of, even where the piece is empty.
    """

    _local: torch.Tensor
    _spec: Spec
    _is_param: bool = False
    _leaf: torch.Tensor | None = None  # of a parameter: the full one, which autograd sees
    num_taken_over: ClassVar[int] = 0  # parameters of users that were made sharded
    _module: str = ""  # of a parameter: the class of the sharded module

    # Attribute access stays in C++ (0.2 us); operators arrive at __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[ShardedTensor], local: torch.Tensor, spec: Spec, requires_grad: bool = False
    ) -> ShardedTensor:
        """Makes a sharded tensor over a piece.

        `local` is 1-D, the elements that `spec` says this rank holds; it is not copied. A
        parameter, its gradients and its optimizer state share one `spec`.
        """
        made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made._local = local
        made._spec = spec
        if type(local) is torch.Tensor:
            # What torch.compiler's mark_static sets, without importing the compiler: a graph with a
            # dynamic piece under a static whole shape can't be built.
            local._dynamo_static_indices = {0}  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler, writes = table.ENTRIES.get(func) or table.entry(func, on_owner)
        if not writes:
            return handler(func, args, kwargs or {})
        try:
            return handler(func, args, kwargs or {})
        finally:
            _bump(writes, args, kwargs or {})

    # ---- values ----

    def to_local(self) -> torch.Tensor:
        """This rank's piece: 1-D, possibly empty, never part of autograd.

        An alias: writes into it are the parameter's, assigning to its `.data` changes it alone.
        """
        return self._local.detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank, as a plain tensor without autograd history.

        A collective: all ranks of the parameter's group call it alike.
        """
        return collectives.gather_whole(self._local.detach(), self._spec)

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        spec = self._spec
        kind = "ShardedParameter" if self._is_param else "ShardedTensor"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{kind}({spec.name!r}, shape={tuple(spec.shape)}, dtype={self.dtype}, "
            f"device={self.device}, elements [{spec.begin}, {spec.end}) here{grad})"
        )

    @property
    def data(self) -> torch.Tensor:
        """A detached alias; assigning a value of the same dtype and device copies it in."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # The C++ setter would accept a whole tensor and leave the piece as it was.
        if value.dtype != self.dtype or value.device != self.device:
            raise RuntimeError(
                f"parameter {self._spec.name!r} is sharded: .data takes values of its own dtype "
                f"and device ({self.dtype}, {self.device}), not ({value.dtype}, {value.device}); "
                "use module.to(...)"
            )
        with torch.no_grad():
            self.copy_(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, torch.Tensor) and key.dtype == torch.bool and not key.dim() + self.dim():
            # torch would ask for the mask's value, which this rank may not hold.
            self.masked_fill_(key, value)
        else:
            super().__setitem__(key, value)

    def register_hook(self, hook: Any) -> Any:
        """Calls `hook` with the whole gradient of this rank's batch, before it is reduced."""
        if self._leaf is None:
            raise RuntimeError(
                f"{self._spec.name!r} is no parameter of a sharded module: autograd computes no "
                "gradient of it, so register_hook() would do nothing"
            )
        leaf: Any = self._leaf
        return leaf.register_hook(hook)

    def check_before_step(self) -> None:
        """Called before every step of an optimizer that holds a subclass of this."""

    # ---- what can't work ----

    def share_memory_(self) -> NoReturn:
        """Not supported: the wrapper has no memory of its own (torch's version would crash)."""
        raise RuntimeError(
            f"parameter {self._spec.name!r} is sharded: share_memory_() is not supported; "
            "share .to_local() or .full_tensor()"
        )

    def _one_value(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"parameter {self._spec.name!r} {tuple(self._spec.shape)} is sharded: {what} would "
            "need values that other ranks hold; call it on .full_tensor() (on all ranks alike)"
        )

    def item(self) -> NoReturn:
        self._one_value("item()")

    def tolist(self) -> NoReturn:
        self._one_value("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        self._one_value("numpy()")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self._one_value("conversion to a numpy array")

    def __bool__(self) -> NoReturn:
        self._one_value("bool()")

    def __float__(self) -> NoReturn:
        self._one_value("float()")

    def __int__(self) -> NoReturn:
        self._one_value("int()")

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        self._one_value("DLPack export")

    # ---- copies ----

    def __copy__(self) -> ShardedTensor:
        copy = ShardedTensor(self._local, self._spec, self.requires_grad)
        copy._is_param = self._is_param
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copy = ShardedTensor(self._local.detach().clone(), self._spec, self.requires_grad)
        copy._is_param = self._is_param
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A view would pickle the whole flat shard, so clone.
        local = self._local.detach().clone()
        return rebuild_tensor, (local, *self._spec.state(), self.requires_grad, self._is_param)

    # ---- torch.compile ----

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: object, stride: object
    ) -> ShardedTensor:
        return ShardedTensor(inner["_local"], *context)

    def _stable_hash_for_caching(self) -> str:
        spec, local = self._spec, self._local
        group = spec.group.group_name if spec.group is not None else None
        facts = (*spec.state(), group, local.shape, local.dtype, local.device, self.requires_grad)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    # ---- torch.distributed.checkpoint finds these three by name ----

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _ in self._spec.boxes
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._spec.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for offsets, sizes, start in self._spec.boxes:
            if torch.Size(offsets) == index.offset:
                # A view, so that loading writes in place.
                return self._local.detach()[start : start + math.prod(sizes)].view(sizes)
        raise ValueError(f"parameter {self._spec.name!r}: no piece at offset {index.offset}")


def rebuild_tensor(
    local: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    ranges: tuple[Any, ...],
    rank: int,
    whole: bool,
    requires_grad: bool,
    is_param: bool,
) -> ShardedTensor:
    """Unpickles a `ShardedTensor`."""
    made = ShardedTensor(local, rebuild_spec(name, shape, ranges, rank, whole), requires_grad)
    made._is_param = is_param
    return made


def sharded_in(values: Any) -> Iterator[ShardedTensor]:
    """The sharded tensors among arguments, also those in lists."""
    for value in values:
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from sharded_in(value)


def first_spec(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spec:
    """The spec of the first sharded tensor among the arguments."""
    if args and type(args[0]) is ShardedTensor:
        return args[0]._spec
    return next(sharded_in((*args, *kwargs.values())))._spec


def on_owner(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of every operator that has none: only who has the whole tensor can run it."""
    if first_spec(args, kwargs).whole:
        from fsdpx.parameter import owned

        return owned.run(func, args, kwargs)
    return refuse(func, args, kwargs)


def refuse(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raises for an operator that can't run on pieces."""
    refuse_for(first_spec(args, kwargs), func, "does not work element by element")


def refuse_for(spec: Spec, func: OpOverload, why: str) -> NoReturn:
    """Raises the error that names the parameter and the way out."""
    raise RuntimeError(
        f"parameter {spec.name!r} {tuple(spec.shape)} is sharded (this rank holds elements "
        f"[{spec.begin}, {spec.end})): {func} {why}. Use .full_tensor() for the whole value "
        "(without gradient), compute with the parameter inside its module's forward, where it is "
        'whole, or shard with fully_shard(..., granularity="parameter"): then its owner computes.'
    )


def _bump(writes: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: Any) -> None:
    """Counts a write on every piece written to: below autograd, torch does not.

    The flat shard's counter is how an edit is noticed, so an empty piece counts as well.
    """
    for position, name in writes:
        _C.count_write(args[position] if position < len(args) else kwargs.get(name))
