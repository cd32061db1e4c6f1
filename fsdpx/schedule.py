"""When units are gathered, freed and reduced: one schedule for all units of a model.

[Note: Same order on all ranks] Every decision here follows from the order of the program (forwards,
reads in backward, completed gradients), never from time. So ranks that run the same program issue
the same collectives in the same order, and place them alike (see memory.py).

[Note: Prefetch] The order of forwards is recorded in each step and used in the next: while a unit
computes, the gathers of the `prefetch` next ones run. Backward follows the ends of the forwards in
reverse (a unit that encloses others usually ends with weights of its own), without the units whose
weights no rank has read in backward (embeddings, frozen units before all that trains). A wrong
guess costs a gather, never a number.

[Note: Units that are passed by] A rank's graph may lack a unit that ran in forward, because its
output was not used there. Other ranks may read that unit and have gradients for it, so a rank whose
backward passes it by issues the same collectives, with zeros for gradients. A backward that
accumulates no gradient of any unit (`torch.autograd.grad` by an input) passes nothing by.

[Note: Who has read what] Which units any rank's backward has read travels with reductions: with a
unit's own, and for wholly frozen units with those of others. What nobody has told yet counts as
read. That lasts: only a unit that some ranks read after none ever had, while others do not use it,
is an error, since those can't know of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from . import _C
from .conversions import settle_conversions
from .gradients import Gradients
from .order import Order, Reads
from .progress import Progress
from .residency import Residency
from .torch_private import NO_BACKWARD, current_backward, outside_of_transforms
from .unit import Phase, Storage, Unit

_MAX_REDUCTIONS = 2  # in flight: one that runs, and one to follow it


class AroundForwards(NamedTuple):
    """What a context in which parameters are not as usual does for outermost forwards inside."""

    before: Callable[[Unit], None]
    after: Callable[[], None]


class Schedule:
    """Runs the units of one root module.

    Attributes:
        units: In registration order, outer before inner.
        levels: How many units enclose each one.
    """

    def __init__(self, units: Sequence[Unit], levels: dict[Unit, int]) -> None:
        self.units = list(units)
        self.levels = levels
        self.around_forwards: list[AroundForwards] = []
        earlier: dict[Unit, Gradients] = {}
        for schedule in {unit.listener for unit in units} - {None}:
            earlier |= schedule.gradients
            self.around_forwards += schedule.around_forwards
        self.gradients = {unit: earlier.get(unit) or Gradients(unit) for unit in units}
        self.residency = Residency(units, levels)
        self._progress = Progress(units)
        self._forward, self._backward = Order(), Order()
        self._forward_now: list[Unit] = []  # what the running forwards came to so far
        self._ended: list[Unit] = []  # the same units in the order in which their forwards ended
        self._frozen: tuple[Unit, ...] = ()  # wholly, in the running backward
        self._reads = Reads()
        self._reads_by_frozen: dict[tuple[Unit, ...], Reads] = {}
        self._thread = 0  # that runs the outermost forward
        self._depth = 0  # nested forwards that are running
        self._tasks: set[int] = set()  # backwards that are running: nested ones have their own
        self._ending = threading.RLock()  # a backward that raised may be ended by another thread
        # Ran with gradients enabled since the last backward, in the order in which forwards ended.
        self._participants: dict[Unit, None] = {}
        self._reduced_any = False
        self._accumulates = False  # whether a running backward computes gradients of units
        self._continues = False  # whether it adds to gradients that no reduction has taken yet
        self._broken = False  # an exception ended a step that had such gradients
        self._reducing: list[Unit] = []  # whose reductions may still run, oldest first
        self._began: dict[Unit, _C.Instant] = {}  # for the timeline
        for unit in units:
            unit.listener = self

    # ---- Properties

    @property
    def is_idle(self) -> bool:
        if not self._depth and current_backward() == NO_BACKWARD:
            self._end_abandoned()
        return not self._depth and not self._tasks

    @property
    def is_connected(self) -> bool:
        """Whether the communicators are open: a reset of another model may have closed them."""
        return not any(comm.closed for comm in self._progress.communicators)

    # ---- Forward

    def settle_conversions(self) -> None:
        """Takes in what `to()` and the like did to the model since the last forward."""
        settle_conversions(self.gradients, self.residency)

    def begin_forward(self, unit: Unit) -> None:
        """Before a unit's forward: gathers it, and starts the gathers of the next ones."""
        recompute = current_backward() != NO_BACKWARD
        if recompute:
            self._begin_backward()
        elif self._depth == 0:
            self._end_abandoned()
            self._check_unbroken()
            for around in self.around_forwards:
                around.before(unit)
            self._settle_waiting()
            self._progress.begin_forward()
            self._forward.follow(self._forward.known)
            self._forward_now, self._ended = [], []
            self.residency.free_stale()
            self._thread = threading.get_ident()
        elif threading.get_ident() != self._thread:
            raise RuntimeError(
                f"fsdpx: unit '{unit.name}' is called while another thread runs the model's "
                "forward: one model is trained by one thread at a time"
            )
        unit.refresh()
        self._gather(unit)
        unit.pins += 1  # now: the gathers of the next units must not take its place
        try:
            self._begin_pass(unit, recompute)
            unit.finish_gather()
        except BaseException:
            unit.pins -= 1
            raise
        self._depth += 1
        unit.num_calls += 1
        if unit.pins == 1:
            unit.to_phase(Phase.FORWARD)
            unit.native.swap_in()
        self._note_begin(unit)

    def _begin_pass(self, unit: Unit, recompute: bool) -> None:
        if recompute:
            self._prefetch(self._backward, unit.backward_prefetch, unit)
        else:
            self._forward.visit(unit)
            self._forward_now.append(unit)
            self._prefetch(self._forward, unit.forward_prefetch, unit)

    def _gather(self, unit: Unit) -> None:
        self.residency.gather(unit, in_backward=bool(self._tasks))

    def _prefetch(self, order: Order, chosen: Sequence[Unit] | None, unit: Unit) -> None:
        """Issues the gathers of the units after `unit`: those that the user chose, else by the
        order.
        """
        if chosen is None:
            chosen = order.next(unit.options.prefetch)
        for following in chosen:
            mine = following.listener is self  # a child may be called by itself
            if mine and following.storage is Storage.SHARDED and not following.pins:
                self._gather(following)

    def end_forward(self, unit: Unit, ok: bool) -> None:
        """After a unit's forward, also one that raised (`ok` false)."""
        self._depth -= 1
        unit.pins -= 1
        if unit.pins == 0:
            if not unit.held:
                unit.kept_by_user = False  # unshard() lasts to the end of the next forward
                unit.native.swap_out()
            unit.to_phase(Phase.IDLE)
        self._record(unit, "forward")
        recompute = current_backward() != NO_BACKWARD
        if not recompute:
            self._ended.append(unit)
            if ok and torch.is_grad_enabled():
                self._participants.pop(unit, None)
                self._participants[unit] = None
        try:
            if ok:
                unit.check_unconverted()
                if unit.storage is Storage.GATHERED and not unit.held:
                    unit.check_unedited()
        finally:
            if unit.pins == 0 and not recompute:
                self._after_forward(unit)
            if not recompute:
                self._progress.end_forward(unit, ok=ok, outermost=self._depth == 0)
                if self._depth == 0:
                    self._end_forwards(ok)

    def _after_forward(self, unit: Unit) -> None:
        if unit.num_calls % len(unit.modules):
            return  # one of several modules: the others need the unit too
        if not self.residency.is_kept(unit) and not unit.kept_by_user:
            if torch.is_grad_enabled():
                self.residency.keep_for_backward(unit)
            self.residency.free(unit)
        elif torch.is_grad_enabled():
            unit.native.set_notify(True)  # its first read in backward starts the next gathers

    def _end_forwards(self, ok: bool) -> None:
        """The outermost forward has ended: units gathered on a wrong guess are freed."""
        if ok:
            self.residency.finish()
        for around in self.around_forwards:
            around.after()
        self.residency.free_others(keep=self.residency.is_kept)
        for unit in self.units:
            unit.num_calls = 0
        if ok:
            first = not self._forward.known
            self._forward.follow(self._forward_now)
            if first or not self.residency.fits:
                self.residency.size_arenas(self._forward_now if first else self.units)
        else:
            self._participants.clear()
            self._broken |= self._has_pending()

    def _settle_waiting(self) -> None:
        for gradients in self.gradients.values():
            if gradients.waiting:
                with outside_of_transforms():
                    gradients.settle_waiting()

    def _has_pending(self) -> bool:
        return any(gradients.is_pending for gradients in self.gradients.values())

    def _check_unbroken(self) -> None:
        """Raises if nobody has said what is to become of the gradients of a broken step."""
        if self._broken:
            raise RuntimeError(
                "fsdpx: an exception ended a step while gradients of its earlier micro-batches "
                "waited for their reduction: call reset_iter_state(), which drops them, and begin "
                "the step again"
            )

    def _note_begin(self, unit: Unit) -> None:
        if unit.comm.recorder.enabled:
            self._began[unit] = unit.comm.stream.computed()

    def _record(self, unit: Unit, operation: str) -> None:
        """Records what has run since `_note_begin`."""
        recorder = unit.comm.recorder
        if recorder.enabled and unit in self._began:
            begin = self._began.pop(unit)
            end = unit.comm.stream.computed()
            recorder.record("compute", unit.name, operation, begin, begin, end, 0)

    # ---- Backward

    def on_access(self, unit: Unit) -> None:
        """An operator of the running backward reads the unit."""
        self._begin_backward()
        unit.check_unchanged()
        self._pass_by(unit, reading=True)
        unit.was_read = True
        self._reads.mine.add(unit)
        self._visit_in_backward(unit)
        unit.finish_gather()
        self._enter_backward(unit)

    def _visit_in_backward(self, unit: Unit) -> None:
        if self._backward.expects(unit):
            self._backward.visit(unit)
        self._gather(unit)
        self._prefetch(self._backward, unit.backward_prefetch, unit)

    def on_first_gradient(self, unit: Unit) -> None:
        """The running backward has computed a first gradient of the unit."""
        self._begin_backward()
        self._enter_backward(unit)

    def _enter_backward(self, unit: Unit) -> None:
        if unit.phase is not Phase.IDLE:
            return
        unit.to_phase(Phase.BACKWARD)
        self._note_begin(unit)

    def on_gradients(self, unit: Unit) -> None:
        """All gradients that the running backward computes for the unit are there."""
        self._pass_by(unit, reading=False)
        if self._backward.expects(unit):  # not read here, but perhaps elsewhere
            self._visit_in_backward(unit)
        self._reduce(unit)
        self._record(unit, "backward")
        if unit.phase is Phase.BACKWARD:
            unit.to_phase(Phase.IDLE)
        self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        # With a frozen part, complete gradients do not mean that the weights are no longer read.
        done = all(unit.trainable) and not unit.pins and not unit.kept_by_user
        if done and not unit.zero.keeps_after_backward:
            self.residency.free(unit)

    def _pass_by(self, unit: Unit | None, reading: bool) -> None:
        """Does for units that this rank's backward passes by, on its way to `unit` (None: to its
        end), what ranks do that read them.

        Args:
            unit: Where backward is now.
            reading: Whether it reads `unit`, or has completed its gradients.
        """
        if not self._accumulates or next(reversed(self._participants), None) is unit:
            return
        passed = list(reversed(self._participants))
        if unit is not None and unit not in self._participants:  # only the order may have it
            ahead = self._backward.before(unit)
            passed = [other for other in passed if other in ahead]
        for other in passed:
            if other is unit:
                return
            if other.pins or other.phase is not Phase.IDLE or other.native.num_expected():
                continue
            expected, trains = self._backward.expects(other), any(other.trainable)
            if expected:
                self._visit_in_backward(other)
            if trains and (expected or not reading):
                self._reduce(other)
            if expected:
                self._after_backward(other)

    def _reduce(self, unit: Unit) -> None:
        self._participants.pop(unit, None)
        self._reduced_any = True
        gradients = self.gradients[unit]
        if unit.zero.reduces_now:
            self._bound_reductions(unit)
            read = [frozen in self._reads.mine for frozen in self._frozen]
            gradients.reduce(1.0 / unit.gradient_divisor, read)
        else:
            gradients.accumulate()

    def _bound_reductions(self, unit: Unit) -> None:
        """Waits while too many reductions hold full gradients: memory must not depend on speed."""
        self._reducing = [other for other in self._reducing if self.gradients[other].in_flight]
        while len(self._reducing) >= _MAX_REDUCTIONS:
            self.gradients[self._reducing.pop(0)].wait()
        self._reducing.append(unit)

    def _begin_backward(self) -> None:
        task = current_backward()
        if task in self._tasks or task == NO_BACKWARD:
            return
        is_outermost = not self._tasks
        if is_outermost:
            latest_first = dict.fromkeys(reversed(self._ended))
            self._frozen = tuple(unit for unit in self.units if not any(unit.trainable))
            self._reads = self._reads_by_frozen.setdefault(self._frozen, Reads())
            self._backward.follow([u for u in latest_first if u not in self._reads.by_nobody])
            self._reduced_any = False
            self._accumulates = False
            self._settle_waiting()
            self._continues = self._has_pending()
            self._progress.begin_backward()
        self._accumulates |= any(unit.native.num_expected() for unit in self.units)
        self._tasks.add(task)
        _C.at_backward_end(functools.partial(self._end_backward, task))
        if is_outermost:
            for unit in self.units:
                unit.check_unconverted()

    def _end_abandoned(self) -> None:
        """Ends backwards that raised, before anything new begins.

        On a GPU autograd runs in a thread of its own, which may come to that later than the caller
        to its next step.
        """
        for task in list(self._tasks):
            self._end_backward(task, ok=False)
        with self._ending:  # a thread that is at it comes to its end first
            pass

    def _end_backward(self, task: int, ok: bool) -> None:
        """A backward has ended, well or by an exception; the outermost one settles everything."""
        with self._ending:
            if task in self._tasks:
                self._tasks.discard(task)
                if not self._tasks:
                    self._end_all(ok)

    def _end_all(self, ok: bool) -> None:
        settled = False
        try:
            if ok:
                self._settle()  # may raise: hooks of the user's run there
                settled = True
        finally:
            if not settled:
                self._participants.clear()
                self._broken |= self._continues
            for unit in self.units:
                unit.native.forget_backward()
                if not settled:
                    self.gradients[unit].forget()
                self._record(unit, "backward")
                if unit.phase is Phase.BACKWARD:
                    unit.to_phase(Phase.IDLE)
            self._progress.end_backward(ok=settled)
            if not settled:
                self.residency.let_go()
            self.free_after_backward()

    def free_after_backward(self) -> None:
        """Frees what need not be gathered until the next forward."""
        self.residency.free_others(keep=lambda unit: unit.zero.keeps_after_backward)
        self.residency.forget_kept(self.units)

    def _settle(self) -> None:
        for unit in reversed(self.units):  # gradients came, though not all that were expected
            if any(unit.native.has_gradients()):
                self._reduce(unit)
        if self._reduced_any:
            self._pass_by(None, reading=False)
            self._participants.clear()
            for unit in reversed(self.units):  # used by earlier micro-batches only
                if self.gradients[unit].is_due:
                    self._reduce(unit)
        self.residency.finish()
        for unit in self.units:
            if self.gradients[unit].in_flight:
                delivered = self.gradients[unit].deliver()
                self._reads.note(unit, read=delivered.read, certain=delivered.used)
                for frozen, read in zip(self._frozen, delivered.news, strict=True):
                    self._reads.note(frozen, read=read, certain=True)
            self.gradients[unit].show_waiting()

    # ---- For FSDPModule

    def unshard(self, unit: Unit) -> None:
        """Issues a gather that lasts until `reshard`."""
        if self.is_idle:
            self.settle_conversions()
            unit.refresh()
            self.residency.free_stale([unit])
        unit.kept_by_user = True
        self._gather(unit)

    def finish_unshard(self, unit: Unit) -> None:
        unit.finish_gather()
        if unit.gathered is not None:
            unit.wait_on_host(unit.gathered.event)
        unit.native.swap_in()

    def reshard(self, unit: Unit) -> None:
        """Frees a unit now, unless its forward runs."""
        if unit.pins:
            raise RuntimeError(f"fsdpx: unit '{unit.name}': reshard() while its forward runs")
        unit.kept_by_user = unit.held = False
        unit.native.swap_out()
        self.residency.free(unit)

    def reset(self) -> None:
        """Forgets a step that was left in the middle; gradients that are not in `.grad` yet are
        dropped. The next use connects the ranks anew: they may have left it at different places.
        """
        self._depth = 0
        self._tasks.clear()
        self._began.clear()
        self._participants.clear()
        for unit in self.units:
            unit.pins = 0
            unit.kept_by_user = unit.held = False
            unit.phase = Phase.IDLE
            unit.native.swap_out()
            unit.native.forget_backward()
            self.residency.free(unit)
            unit.listener = None
        self.forget_gradients(self.units)
        self.close()
        for comm in self._progress.communicators:
            comm.close(seconds=0.5)

    def forget_gradients(self, units: Iterable[Unit]) -> None:
        """Drops gradients that wait for their reduction."""
        if current_backward() == NO_BACKWARD:
            self._end_abandoned()
        for unit in units:
            self.gradients[unit].forget()
        self._broken &= self._has_pending()

    def close(self) -> None:
        """Gives all memory back: another schedule takes the units over."""
        for unit in self.units:
            unit.kept_by_user = unit.held = False
        self.residency.close()
