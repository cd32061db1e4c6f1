"""Where a model is in its training, for the errors of ranks that went apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .comm import Communicator
from .errors import DesyncError
from .post_forward import communicators_of
from .unit import Unit

# As in csrc/communicator.h
_FORWARD, _BACKWARD, _BETWEEN = 1, 2, 3


class Progress:
    """Counts steps and forwards, and tells the communicators, whose messages show them.

    A step ends with its backward. The counts need not be alike on all ranks.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        of_units = [[*communicators_of(unit), unit.replicate_comm] for unit in units]
        found = [comm for comms in of_units for comm in comms if comm]
        self.communicators: list[Communicator] = list(dict.fromkeys(found))
        self._step, self._forward = 1, 0
        self._failed: Unit | None = None  # the innermost unit whose forward raised

    def _tell(self, phase: int) -> None:
        for comm in self.communicators:
            for native in {comm.native, comm.control.native}:
                native.set_moment(self._step, self._forward, phase)

    def begin_forward(self) -> None:
        """The outermost forward begins."""
        self._forward += 1
        self._failed = None
        self._tell(_FORWARD)

    def end_forward(self, unit: Unit, *, ok: bool, outermost: bool) -> None:
        """A forward has ended, well or by an exception that is being raised now."""
        if not ok and self._failed is None:
            self._failed = unit
        if not outermost:
            return
        if not ok and self._failed is not None:
            self._leave_word(f"in forward {self._forward} of unit '{self._failed.name}'")
        self._tell(_BETWEEN)

    def begin_backward(self) -> None:
        self._tell(_BACKWARD)

    def end_backward(self, *, ok: bool) -> None:
        if not ok:
            self._leave_word("in backward")
        self._step, self._forward = self._step + 1, 0
        self._tell(_BETWEEN)

    def _leave_word(self, where: str) -> None:
        """Lets ranks that wait for this one know that it raised."""
        error = sys.exception()
        if isinstance(error, DesyncError):
            return
        what = f" {type(error).__name__}" if error is not None else ""
        for comm in self.communicators:
            comm.leave_word(f"raised{what} {where} of step {self._step}")
