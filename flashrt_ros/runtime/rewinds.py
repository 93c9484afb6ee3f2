"""Restore, rollback, reset and clock jumps: check, stop, order the copy.

Everything is checked before anything changes: the session checks the capsule, the guard the robot.
`check: true` ends there. HOST state is back as soon as the copy is ordered; DEVICE state follows in
order on the device thread, and until then no inference starts.
"""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from flashrt_ros.core.capsule import CapsuleInfo, EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.rewind import Plan
from flashrt_ros.runtime import guard
from flashrt_ros.runtime.guard import Moved
from flashrt_ros.runtime.hub import Hub
from flashrt_ros.runtime.phases import Cause, after
from flashrt_ros.runtime.sink import RewindAnswer
from flashrt_ros.runtime.stops import Stops

JUMP_GRACE_S = 1.0  # a clock jump this soon after a restore belongs to it: a simulator went back
WORDS = {EventKind.RESTORED: 'restored', EventKind.ROLLED_BACK: 'rolled back to',
         EventKind.RESET: 'reset to'}


class Rewinds:
    """Returns the policy, not the world, to where it was. Called under the lock."""

    def __init__(self, hub: Hub, stops: Stops) -> None:
        self._hub = hub
        self._stops = stops
        self.go: Callable[[], None] = lambda: None     # steps may go on
        self._asked = 0                                # copies under way that a verb asked for

    # -- checks ---------------------------------------------------------------------------

    def plan_goal(self, name: str) -> Plan:
        """Check the restore that a goal asks for."""
        plan = self._hub.session.plan_restore(name)
        self.judge(plan, force=False)
        return plan

    def judge(self, plan: Plan, *, force: bool) -> tuple[Moved, str]:
        """Ask the guard; return what has moved and what to say of it. Raises Refusal."""
        hub = self._hub
        spec = hub.file.guard
        after(Cause.REWIND, hub.phase)         # FAULT refuses
        if hub.lock_step or plan.is_origin:
            return Moved(), ''
        now_ns = hub.clock.now_ns()
        guard.check_age(spec, plan, now_ns)
        if not spec.witness:
            return Moved(), ''
        moved = guard.compare(hub.observation.guard, plan.mark.witness,
                              hub.observation.measured(now_ns))
        return moved, guard.judge(spec, moved, force=force, allow_force=hub.allow_force)

    # -- the verb -------------------------------------------------------------------------

    def when_loaded(self, attempt: Callable[[], None], failed: Callable[[Exception], None],
                    *, again: bool = True) -> None:
        """Run `attempt`; where its capsule rests on disk, load that first and run it again."""
        try:
            try:
                attempt()
            except Refusal as error:
                if not (again and 'on_disk' in error.details):
                    raise
                name, id_ = error.details['on_disk']
                loading = self._hub.session.load(name, if_id=id_)
                loading.add_done_callback(
                    lambda future: self._when_loaded(future, attempt, failed))
        except Exception as error:
            failed(error)

    def _when_loaded(self, loading: Future[CapsuleInfo], attempt: Callable[[], None],
                     failed: Callable[[Exception], None]) -> None:
        """On the spill thread: the capsule is in memory, or cannot be read."""
        with self._hub.locked():
            error = loading.exception()
            if error is None:
                self.when_loaded(attempt, failed, again=False)
            else:
                failed(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def rewind(self, plan: Plan, answer: Future[RewindAnswer], *, check: bool, force: bool
               ) -> None:
        """Carry out a plan and answer after its copy; with `check` only say what would happen."""
        hub = self._hub
        moved, remark = self.judge(plan, force=force)
        what = f'{WORDS[plan.kind]} {plan.info.name or f"step {plan.info.step}"!r}'
        if check:
            text = f'possible: would be {what}'
            answer.set_result(self._answer(plan, moved, f'{text}; {remark}' if remark else text))
            return
        loaded, trouble = self.carry_out(plan, Code.RESTORED, f'{what}; send a new goal',
                                         stops=not hub.goes_on)
        text = '; '.join(t for t in (what, remark, trouble) if t)

        def finish(future: Future[CapsuleInfo]) -> None:
            error = future.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(self._answer(plan, moved, text))
        loaded.add_done_callback(finish)

    def _answer(self, plan: Plan, moved: Moved, text: str) -> RewindAnswer:
        return RewindAnswer(plan.info, self._hub.session.epoch, text, moved.names, moved.distance,
                            moved.limit)

    def carry_out(self, plan: Plan, code: Code, message: str, *, asked: bool = True,
                  stops: bool = True) -> tuple[Future[CapsuleInfo], str]:
        """Stop, then order the copy; the goal ends with `code`. Return what on_stop could not do.

        Not `stops`: lock step goes on. Raises Refusal where the capsule went since it was planned
        (a save in another thread evicted it); motion has ended then, by a stop.
        """
        trouble = self._stops.quiet(after(Cause.REWIND, self._hub.phase)) if stops else ''
        try:
            loaded = self._apply(plan, asked)
        except Refusal as error:
            if stops:
                self._hub.session.raise_epoch()
                self._stops.abandon()
                self._stops.end_goal(error.code, error.message, trouble)
            raise
        if stops:
            self._stops.end_goal(code, message, trouble)
        return loaded, trouble

    def _apply(self, plan: Plan, asked: bool) -> Future[CapsuleInfo]:
        """Order the copy and make the runner's own present that of the boundary."""
        hub = self._hub
        chunks = (hub.flight is not None) + (hub.pending is not None)
        rows = hub.queue.left
        future = hub.session.apply(plan)       # refuses where the capsule went meanwhile
        hub.count.dropped_chunks += chunks
        hub.count.dropped_rows += rows
        if hub.flight is not None:             # what it took in stays in the record
            hub.latched[:0] = hub.flight.latched
        hub.flight = hub.pending = None
        hub.begun = hub.owed = hub.prefill = False
        while hub.observation.take():          # lock step: sent before, and so not fresh
            pass
        hub.fresh_ns = 0 if hub.lock_step else hub.clock.now_ns()
        hub.mark = plan.mark
        if hub.lock_step:
            hub.pending = hub.session.pending_after_restore
        else:
            hub.count.dropped_rows += hub.queue.flush()
            if hub.session.pending_after_restore is not None:
                hub.count.dropped_chunks += 1
        hub.rewinding += 1
        self._asked += asked
        hub.changed()
        future.add_done_callback(lambda future: self._loaded(future, asked))
        return future

    def _loaded(self, future: Future[CapsuleInfo], asked: bool) -> None:
        """On the device thread: the copy is done, or has failed."""
        hub = self._hub
        with hub.locked():
            hub.rewinding -= 1
            if asked:
                self._asked -= 1
                hub.rewound = hub.clock.steady()
            error = future.exception()
            if error is None:
                self.go()
            else:
                self._stops.fault(error if isinstance(error, Refusal)
                                  else Refusal(Code.FAULT, str(error)))

    # -- clock jumps ----------------------------------------------------------------------

    def clock_jumped(self, message: str) -> None:
        """ROS time went backward: stamps and what was received mean nothing any more."""
        hub = self._hub
        mine = self._asked or hub.clock.steady() - hub.rewound < JUMP_GRACE_S
        if not mine and hub.fault is None:
            try:
                self._jump(message)
            except Refusal as error:           # the session met a fault that we hear of only now
                self._stops.fault(error)
        hub.clock_epoch += 1                   # on_stop still needed what was measured
        hub.observation.clear(hub.clock_epoch)
        hub.fresh_ns = 0
        hub.owed = False
        hub.changed()

    def _jump(self, message: str) -> None:
        """Stop, and return STATE to origin or keep it, as a whole."""
        hub = self._hub
        if hub.file.run.on_clock_jump == 'reset':
            self.carry_out(hub.session.plan_reset(), Code.RESTORED, message, asked=False,
                           stops=not hub.goes_on)
        elif hub.goes_on:
            hub.session.raise_epoch()
        else:
            self._stops.stop(Cause.REWIND, Code.RESTORED, message)
        self._stops.tell_clock_jump(message)
