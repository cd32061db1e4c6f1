"""Errors that fsdpx raises beside the ordinary ones."""

__all__ = ["CommTimeout", "DesyncError", "FsdpxError"]


class FsdpxError(Exception):
    """Base of the errors of this package, mixed into an ordinary kind of error."""


class DesyncError(FsdpxError, RuntimeError):
    """Ranks of one group did different things: another operation, unit, version or size.

    Raised on every rank of the group; the message names both sides. The communicator
    is of no use afterwards.
    """


class CommTimeout(FsdpxError, RuntimeError):
    """A wait for other ranks passed its time limit.

    The message names the operation, the unit, its sequence number, and where each rank is.
    The communicator is of no use afterwards.
    """
