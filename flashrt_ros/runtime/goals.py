"""Goals, and everything that permits or forbids motion: start, pause, resume, enable, limits.

At most one goal is active. A new one preempts; its checks come first, so that a goal that is
refused leaves the running one alone. Nothing but a goal, ~/start, ~/resume and autorun starts
motion.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.hub import Hub
from flashrt_ros.runtime.motion import Motion
from flashrt_ros.runtime.phases import Cause, Phase, after
from flashrt_ros.runtime.sink import DEFAULT_LIMIT_S, Feedback, Goal, GoalRequest, GoalResult
from flashrt_ros.runtime.stops import Stops

if TYPE_CHECKING:
    from flashrt_ros.runtime.rewinds import Rewinds


class Goals:
    """Permission to move. Everything here is called under the lock."""

    def __init__(self, hub: Hub, motion: Motion, stops: Stops, rewinds: Rewinds) -> None:
        self._hub = hub
        self._motion = motion
        self._stops = stops
        self._rewinds = rewinds
        self._enabled = False          # last value of the enable topic
        self._enabled_at = -math.inf   # steady time of its arrival

    # -- start and end --------------------------------------------------------------------

    def execute(self, request: GoalRequest, *, unlimited: bool = False) -> Goal:
        """Begin a goal; one that cannot begin ends at once with the reason."""
        goal = Goal(request, unlimited=unlimited)
        asked = self._hub.session.epoch

        def attempt() -> None:
            if goal.cancelled:                 # while its capsule was read from disk
                raise Refusal(Code.CANCELLED, 'the client cancelled the goal')
            epoch = self._hub.session.epoch
            if epoch != asked:                 # a stop, for example: it must not begin after that
                raise Refusal(Code.STALE_EPOCH, f'while capsule {request.capsule!r} was read the '
                              f'epoch went from {asked} to {epoch}: something else was asked for '
                              'since; look and ask again')
            self._begin(goal)
            self._rewinds.go()

        def failed(error: Exception) -> None:
            refusal = error if isinstance(error, Refusal) else Refusal(
                Code.INTERNAL, f'{type(error).__name__}: {error}')
            self._hub.refused(refusal)
            self._finish(goal, GoalResult(refusal.code, refusal.message, 0,
                                          self._hub.session.epoch))
        self._rewinds.when_loaded(attempt, failed)
        return goal

    def _finish(self, goal: Goal, result: GoalResult) -> None:
        goal.result = result
        self._hub.later(lambda: self._hub.sink.goal_done(goal, result))
        self._hub.later(goal.announce)

    def _begin(self, goal: Goal) -> None:
        """Check everything, then stop what runs, then permit motion."""
        hub = self._hub
        request = goal.request
        hub.check_usable()
        if not hub.active:
            raise Refusal(Code.WRONG_PHASE, 'the node is inactive; activate it first')
        if not 0 <= request.max_duration_s < math.inf:
            raise Refusal(Code.INVALID_ARGUMENT, f'max_duration_s is {request.max_duration_s}; '
                          f'give seconds, or 0 for the default of {DEFAULT_LIMIT_S:g}')
        if request.if_epoch and request.if_epoch != hub.session.epoch:
            raise Refusal(Code.STALE_EPOCH, f'if_epoch {request.if_epoch} is not the present epoch '
                          f'{hub.session.epoch}: something happened since; look and ask again')
        if not request.shadow:
            self._check_enabled()
        plan = self._rewinds.plan_goal(request.capsule) if request.capsule else None
        follows = after(Cause.GOAL, hub.phase, shadow=request.shadow)
        self._check_prompt(request.prompt)

        why = 'a newer goal took over'
        if plan is not None:
            self._rewinds.carry_out(plan, Code.PREEMPTED, why)
            hub.check_usable()                 # the copy may have failed already
        elif hub.phase is not Phase.HOLD:
            self._stops.stop(Cause.STOP, Code.PREEMPTED, why)
        else:                                  # lock step may hold a restored queue: it goes on
            hub.session.raise_epoch()
        self.set_prompt(request.prompt)
        self._motion.end_repeat()
        goal.started = hub.clock.steady()
        hub.goal = goal
        hub.phase = follows
        hub.wait_for('')
        hub.changed()

    def _check_prompt(self, prompt: str) -> None:
        """Refuse a prompt that the policy cannot take; STATE is as before."""
        observation = self._hub.observation
        old = observation.prompt
        if prompt and prompt != old:
            observation.set_prompt(prompt)     # all or nothing
            observation.set_prompt(old)

    def set_prompt(self, prompt: str) -> bool:
        """Write another prompt into STATE and drop what was computed with the old one; return
        whether it was another one. The caller raises the epoch."""
        hub = self._hub
        if not prompt or prompt == hub.observation.prompt:
            return False
        begun = hub.begun
        hub.forget_step()                      # it latched the old prompt
        hub.owed = hub.owed or begun
        hub.observation.set_prompt(prompt)
        self._stops.abandon()
        hub.prefill = hub.session.prefills
        hub.session.recommit()                 # a save before the next step has the new prompt
        return True

    def prompt_event(self, prompt: str) -> None:
        """A prompt came on its topic."""
        if self.set_prompt(prompt):
            self._hub.session.raise_epoch()
            self._hub.changed()

    def cancel(self, goal: Goal) -> bool:
        """End a goal for its client; False where it has ended already."""
        if goal.result is None and goal is not self._hub.goal:
            goal.cancelled = True
            return True
        if goal is not self._hub.goal:
            return False
        self._stops.stop(Cause.STOP, Code.CANCELLED, 'the client cancelled the goal')
        return True

    # -- limits ---------------------------------------------------------------------------

    def over(self) -> bool:
        """End a goal whose time or ticks are used up; return whether it has ended."""
        goal = self._hub.goal
        return goal is not None and (self._time_over(goal) or self._ticks_over(goal))

    def _time_over(self, goal: Goal) -> bool:
        hub = self._hub
        limit = goal.request.max_duration_s or (math.inf if goal.unlimited else DEFAULT_LIMIT_S)
        if hub.clock.steady() - goal.started < limit:
            return False
        if not goal.acted and hub.waiting_for:
            code, text = Code.INPUT_STALE, f'still waiting for {hub.waiting_for}'
        elif goal.request.max_duration_s:
            code, text = Code.OK, 'max_duration_s is reached'
        else:
            code, text = Code.LIMIT_REACHED, 'the default limit is reached; give max_duration_s'
        self._stops.stop(Cause.STOP, code, f'{text} (after {limit:g} s)')
        return True

    def _ticks_over(self, goal: Goal) -> bool:
        hub = self._hub
        limit = goal.request.max_ticks
        if not limit or goal.ticks < limit or hub.queue.left or hub.flight is not None:
            return False
        self._stops.stop(Cause.STOP, Code.OK, f'max_ticks {limit} is reached')
        return True

    # -- enable, pause, resume ------------------------------------------------------------

    def enable(self, value: bool) -> None:
        """The enable topic said something. True alone never starts motion."""
        self._enabled = value
        self._enabled_at = self._hub.clock.steady()
        self.check_enable()

    def _why_disabled(self) -> str:
        spec = self._hub.file.enable
        if spec is None:
            return ''
        silent = self._hub.clock.steady() - self._enabled_at
        if silent == math.inf:
            return f'{spec.topic} was never received'
        if silent > spec.max_age_s:
            return f'{spec.topic} is silent for {silent:.2f} s, the limit is {spec.max_age_s:g} s'
        return '' if self._enabled else f'{spec.topic} is false'

    def _check_enabled(self) -> None:
        why = self._why_disabled()
        if why:
            raise Refusal(Code.PAUSED, f'{why}; enable first, then ask again')

    def check_enable(self) -> None:
        """Pause where enable is lost."""
        if self._hub.phase is Phase.RUNNING:
            why = self._why_disabled()
            if why:
                self.pause(f'{why}; enable, then resume')

    def pause(self, why: str) -> str:
        """Stop moving and keep the goal open. Raises Refusal unless RUNNING."""
        trouble = self._stops.stop(Cause.PAUSE, Code.PAUSED, why)
        self._hub.wait_for(why)
        return trouble

    def resume(self) -> None:
        """Go on with the goal. Raises Refusal: WRONG_PHASE, PAUSED, INPUT_STALE, FAULT."""
        hub = self._hub
        follows = after(Cause.RESUME, hub.phase)
        self._check_enabled()
        missing = hub.observation.missing(hub.clock.now_ns(), hub.fresh_ns)
        if missing:
            raise Refusal(Code.INPUT_STALE, '; '.join(str(m) for m in missing))
        self._motion.end_repeat()
        hub.phase = follows
        hub.wait_for('')
        hub.changed()

    def permitted(self) -> bool:
        """Whether a step may be taken now; pauses or ends the goal where it may not."""
        self.check_enable()
        return self._hub.moving and not self.over()

    def feedback(self) -> Feedback:
        """Return how the goal fares."""
        hub = self._hub
        age = hub.clock.now_ns() - hub.mark.stamp_ns if hub.mark.stamp_ns else 0
        return Feedback(hub.phase, hub.session.tick, hub.session.epoch, hub.queue.left,
                        max(0, age) * 1e-9, hub.count.late_ticks, hub.waiting_for)
