"""stop(): the one way in which motion ends, and what follows from a failure.

Raise the epoch, flush the queue, and, only if the phase was RUNNING, publish each output's on_stop,
then be silent. From any other phase stop() publishes nothing: somebody else may be driving.
"""
from __future__ import annotations

import logging

from flashrt_ros.core.capsule import ORIGIN, CapsuleInfo, Event, EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.payload import Tier
from flashrt_ros.runtime.hub import Hub
from flashrt_ros.runtime.motion import Motion
from flashrt_ros.runtime.phases import Cause, Phase, after
from flashrt_ros.runtime.sink import GoalResult

log = logging.getLogger('flashrt_ros.runtime')


class Stops:
    """Ends motion and goals. Everything here is called under the lock."""

    def __init__(self, hub: Hub, motion: Motion) -> None:
        self._hub = hub
        self._motion = motion

    def stop(self, cause: Cause, code: Code, message: str) -> str:
        """End motion for `cause`; the goal ends with `code`, except that a pause leaves it open.

        Returns what on_stop could not do, '' where all is well. Raises Refusal where the phase
        table has no such transition.
        """
        follows = after(cause, self._hub.phase)
        self._hub.session.raise_epoch()
        self.abandon()
        trouble = self.quiet(follows)
        if cause is not Cause.PAUSE:
            self.end_goal(code, message, trouble)
        return trouble

    def quiet(self, follows: Phase) -> str:
        """Send on_stop if RUNNING and leave the phase; what is published next begins anew.

        Raises no epoch and drops no rows: whoever calls it does, at once, by a restore or a stop.
        """
        hub = self._hub
        trouble = self._motion.halt() if hub.phase is Phase.RUNNING else ''
        hub.phase = follows
        hub.publishing = False
        hub.wait_for('')
        hub.changed()
        return trouble

    def abandon(self) -> None:
        """Drop all rows and chunks computed so far; what is published next is computed anew.

        An inference under way still counts as a tick when it finishes: STATE has moved on.
        """
        hub = self._hub
        hub.forget_step()
        hub.count.dropped_rows += hub.queue.flush()
        if hub.flight is not None:
            hub.flight.doomed = 'epoch'
        if hub.pending is not None:            # not started again: its tick does not count
            hub.pending = None
            hub.count.dropped_chunks += 1

    def end_goal(self, code: Code, message: str, trouble: str = '') -> None:
        """End the goal, if there is one, and tell once the lock has been let go."""
        hub = self._hub
        message = f'{message}; {trouble}' if trouble else message
        goal, hub.goal = hub.goal, None
        if goal is None:
            return
        capsules = [c for c in hub.session.list() if c.name != ORIGIN and c.tier is not Tier.NONE]
        goal.result = result = GoalResult(code, message, goal.ticks, hub.session.epoch,
                                          *capsules[-1:])
        hub.later(lambda: hub.sink.goal_done(goal, result))
        hub.later(goal.announce)
        hub.keep('goal_end', f'{code.name}: {message}')
        hub.changed()

    def fail(self, error: Refusal) -> None:
        """End motion because a step could not be taken."""
        hub = self._hub
        if error.code is Code.FAULT or hub.session.fault is not None:
            self.fault(error)
            return
        hub.refused(error)
        if hub.moving:
            self.stop(Cause.STALE, error.code, error.message)

    def bug(self, error: Exception) -> None:
        """End motion because of an error that nobody foresaw; the log has the traceback."""
        log.error('a step failed', exc_info=error)
        self.fail(Refusal(Code.INTERNAL, f'{type(error).__name__}: {error}'))

    def fault(self, error: Refusal) -> None:
        """Give up for good: the device or the policy failed, and STATE with it."""
        hub = self._hub
        if hub.phase is Phase.FAULT:
            return
        hub.fault = error
        hub.refused(error)
        self.stop(Cause.FAULT, Code.FAULT, f'{error.message}; clean up and configure the node')

    def tell_clock_jump(self, message: str) -> None:
        """Tell that ROS time went backward."""
        hub = self._hub
        hub.sink.event(Event(EventKind.CLOCK_JUMP, CapsuleInfo(), hub.session.epoch,
                             message=message))
