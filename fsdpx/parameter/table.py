"""Which handler an operator has when a sharded tensor is among its operands.

Handlers come from two sources: named operators (`handles`) and rules over families of operators
(`family`). An operator that neither knows is refused with an error that names the parameter, so a
rank-local result never passes for a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
Family = Callable[[OpOverload], Handler | None]

_NAMED: dict[OpOverload, Handler] = {}
_FAMILIES: list[Family] = []


class Entry(NamedTuple):
    """How to run one operator.

    Attributes:
        handler: Does the work.
        writes: Position and name of every argument that the operator writes to.
    """

    handler: Handler
    writes: tuple[tuple[int, str], ...]


ENTRIES: dict[OpOverload, Entry] = {}
"""Filled as operators are first met."""


def handles(*operators: OpOverload) -> Callable[[Handler], Handler]:
    """Registers the decorated handler for the given operators."""

    def register(handler: Handler) -> Handler:
        _NAMED.update(dict.fromkeys(operators, handler))
        return handler

    return register


def family(rule: Family) -> Family:
    """Registers a rule that gives an operator's handler, or None if it is not of the family."""
    _FAMILIES.append(rule)
    return rule


def find(func: OpOverload) -> Handler | None:
    """The handler of an operator, or None if it is refused."""
    if func in _NAMED:
        return _NAMED[func]
    return next((found for rule in _FAMILIES if (found := rule(func))), None)


def entry(func: OpOverload, refuse: Handler) -> Entry:
    """Looks an operator up and remembers the answer."""
    arguments = enumerate(func._schema.arguments)
    writes = tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)
    ENTRIES[func] = found = Entry(find(func) or _composite(func) or refuse, writes)
    return found


def _composite(func: OpOverload) -> Handler | None:
    """Splits operators made of others, which autograd splits but inference mode does not."""
    if not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return None
    return lambda func, args, kwargs: func.decompose(*args, **kwargs)
