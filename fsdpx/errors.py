"""Errors that fsdpx raises beside the ordinary ones."""

__all__ = ["CommTimeout", "DesyncError", "FsdpxError"]


class FsdpxError(Exception):
    """Base of the errors of this package, mixed into an ordinary kind of error."""


class DesyncError(FsdpxError, RuntimeError):
    """Ranks of one group did different things: another operation, unit, version or size.

    Or one of them has left or ended. Raised on every rank of the group that is still there; the
    message names both sides, what they did last alike, and where in forward or backward of which
    step they are.

    Every later collective of the group raises it again, until `reset_iter_state()` has been called
    on the sharded model on all ranks: then the ranks connect anew, and the next step is a clean
    one.
    """


class CommTimeout(DesyncError):
    """A wait for other ranks passed its time limit: one of them is slow, raised or went another
    way.

    The message names the operation, the unit, its sequence number, and where each rank is. See
    `DesyncError` for the way on.
    """
