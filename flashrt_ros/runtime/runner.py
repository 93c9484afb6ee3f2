"""One policy at work between messages and actions: the orchestrator, without ROS.

The runner owns one lock. Whoever has something to tell it, the executor's thread with a message, a
timer or a verb, the device thread with a finished inference or restore, takes the lock, carries
things as far as they get, and leaves. Nothing waits under the lock for an inference, a device or a
file. Everything that leaves goes through the sink.

    hub.py      what the parts share         phases.py   the phase table
    steps.py    when a step happens          stops.py    how motion ends
    motion.py   rows become commands         goals.py    permission to move
    rewinds.py  return to a boundary         guard.py    may it return there?
    verbs.py    save, restore, rollback, …   chunks.py   the record of inferences

With `Options(threaded=False)` inferences run inside `feed` and `timer`, and the same runner steps
in process, faster than real time: offline replay, studies, tests.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashrt_ros.core.capsule import ORIGIN
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec
from flashrt_ros.core.payload import Tier
from flashrt_ros.core.session import Session
from flashrt_ros.ingest.actions import ActionQueue
from flashrt_ros.ingest.inbox import Arrival, InputTopic
from flashrt_ros.ingest.observation import Observation
from flashrt_ros.ingest.output import OutputMap
from flashrt_ros.ingest.spec import PolicyFile, QosSpec
from flashrt_ros.runtime.chunks import Chunks
from flashrt_ros.runtime.goals import Goals
from flashrt_ros.runtime.hub import Hub
from flashrt_ros.runtime.motion import Motion
from flashrt_ros.runtime.phases import Cause, Phase
from flashrt_ros.runtime.rewinds import Rewinds
from flashrt_ros.runtime.sink import Clock, Goal, GoalRequest, Sink, StatusSnapshot
from flashrt_ros.runtime.steps import Steps
from flashrt_ros.runtime.stops import Stops
from flashrt_ros.runtime.verbs import Verbs

BOOL = 'std_msgs/msg/Bool'


def no_digest() -> int:
    """Stand in for the digest of a message that was not serialised."""
    return 0


class Runner(Verbs):
    """A configured policy. `build` makes one; `close` frees it."""

    def __init__(self, file: PolicyFile, session: Session, observation: Observation,
                 queue: ActionQueue, outputs: Mapping[str, OutputMap], sink: Sink, clock: Clock,
                 ports: Mapping[str, BufferSpec], *, allow_force: bool = False) -> None:
        self.file = file
        self.session = session
        self.observation = observation
        self._hub = hub = Hub(file, session, observation, queue, outputs, sink, clock, allow_force)
        self._motion = Motion(hub)
        self._stops = Stops(hub, self._motion)
        self._rewinds = Rewinds(hub, self._stops)
        self._goals = Goals(hub, self._motion, self._stops, self._rewinds)
        self._steps = Steps(hub, self._motion, self._stops, self._goals, Chunks(hub, ports))
        self._rewinds.go = self._steps.go
        self._part = 0
        self._ended = False            # shut down: it does not become active again

    def close(self, timeout_s: float = 5.0) -> bool:
        """Free everything; False where a program did not return in time."""
        return self.session.close(timeout_s)

    # -- what it is -----------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._hub.phase

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self.session.epoch

    @property
    def allow_force(self) -> bool:
        """Whether `force` may override the guard."""
        return self._hub.allow_force

    @allow_force.setter
    def allow_force(self, value: bool) -> None:
        self._hub.allow_force = value

    @property
    def goal(self) -> Goal | None:
        """The active goal."""
        return self._hub.goal

    @property
    def step_period_s(self) -> float | None:
        """How often `timer` wants to be called; None in lock step."""
        if self._hub.lock_step:
            return None
        return self.file.policy.period_s / self._motion.parts

    def topics(self) -> list[InputTopic]:
        """Return what to subscribe to and hand to `feed`."""
        topics = self.observation.topics()
        if self.file.enable is not None:
            topic = self.file.enable.topic
            wish = self.file.qos.get(topic, QosSpec())
            topics.append(InputTopic(topic, BOOL, bool(wish.reliable), wish.depth or 1))
        return topics

    def describe(self) -> str:
        """Return one line about the policy, for a log."""
        run = self.file.run
        how = (f'lock step on {", ".join(run.trigger)}' if run.lock_step
               else f'{1 / self.file.policy.period_s:g} Hz')
        return (f'{self.file.policy.backend}, {how}, {self.session.state_nbytes:,} bytes of state, '
                f'inputs {", ".join(self.file.inputs) or "none"}, outputs '
                f'{", ".join(self.file.outputs)}')

    def status(self) -> StatusSnapshot:
        """Return the present for msg/PolicyStatus."""
        hub, session = self._hub, self.session
        infos = [i for i in session.list() if i.name != ORIGIN and i.tier is not Tier.NONE]
        usage, stats = session.usage(), session.stats()
        with hub.locked():
            count = hub.count
            return StatusSnapshot(
                hub.phase, hub.waiting_for, self.observation.prompt, session.id, session.epoch,
                session.tick, session.step, hub.queue.left, count.late_ticks, count.dropped_chunks,
                count.dropped_rows, count.clipped, count.rejected_inputs, stats.tick_p50_s,
                stats.tick_p99_s, stats.restore_bound_s, len(infos),
                usage.device + usage.host + usage.disk, hub.last_refusal, session.exact)

    # -- what happens to it ---------------------------------------------------------------

    def feed(self, topic: str, msg: Any, *, digest: Callable[[], int] = no_digest,
             seq: int | None = None) -> None:
        """Take in a message. `seq` is its publication sequence number, `digest` the first 8 bytes
        of SHA-256 of its serialised form. Raises Refusal(INPUT_REJECTED), with nothing changed.
        For one thread at a time: it reads the message before it takes the lock.
        """
        hub = self._hub
        if self.file.enable is not None and topic == self.file.enable.topic:
            permitted = bool(msg.data)
            with hub.locked():
                self._goals.enable(permitted)
            return
        epoch = hub.clock_epoch                # read first: a jump in between drops the message
        arrival = Arrival(hub.clock.now_ns(), epoch)
        parsed = self.observation.parse(topic, msg)
        with hub.locked():
            try:
                prompt = self.observation.receive(topic, parsed, arrival, digest, seq)
                if prompt is not None:
                    self._goals.prompt_event(prompt)
            except Refusal as error:
                hub.count.rejected_inputs += 1
                hub.last_refusal = str(error)
                hub.changed()
                raise
            if hub.lock_step:
                for problem in self.observation.lockstep_problems():
                    self._trouble(problem)
                self._steps.go()
            elif prompt is not None:
                self._steps.go()

    def _trouble(self, problem: str) -> None:
        """In lock step a lost or overtaken message is an error once motion has begun."""
        hub = self._hub
        hub.count.rejected_inputs += 1
        if hub.goal is not None and hub.goal.acted and hub.moving:
            self._stops.fail(Refusal(Code.INPUT_REJECTED, problem))

    def timer(self) -> None:
        """One period has passed; `step_period_s` says how long it is. Not in lock step."""
        hub = self._hub
        with hub.locked():
            if hub.lock_step or not hub.moving:
                self._part = 0
                self._goals.over()
                if not hub.lock_step:
                    self._motion.repeat()
                return
            part, self._part = self._part, (self._part + 1) % self._motion.parts
            if part == 0:
                self._goals.permitted()
                self._steps.owe()
            elif self._goals.permitted():
                self._between(part)

    def _between(self, part: int) -> None:
        try:
            self._motion.between(part)
        except Refusal as error:
            self._stops.fail(error)
        except Exception as error:
            self._stops.bug(error)

    def poll(self) -> None:
        """Look after limits and a silent enable, and send feedback. Call it a few times a second;
        live, `timer` looks after the former too."""
        hub = self._hub
        with hub.locked():
            self._goals.check_enable()
            self._goals.over()
            self._steps.go()
            goal = hub.goal
            if goal is not None:
                feedback = self._goals.feedback()
                hub.later(lambda: hub.sink.goal_feedback(goal, feedback))

    def clock_jumped(self, delta_ns: int, *, switched: bool = False) -> None:
        """ROS time jumped by `delta_ns`, or (`switched`) comes from another source now."""
        if delta_ns >= 0 and not switched:
            return
        text = ('ROS time comes from another source now' if switched
                else f'ROS time went back by {-delta_ns * 1e-9:.3f} s')
        with self._hub.locked():
            self._rewinds.clock_jumped(text)

    # -- phases ---------------------------------------------------------------------------

    def activate(self) -> None:
        """Go to HOLD, or with autorun on to RUNNING. Raises Refusal after `shutdown`."""
        with self._hub.locked():
            if self._ended:
                raise Refusal(Code.WRONG_PHASE, 'the node is leaving and does not move again')
            self._hub.active = True
            if self.file.run.autorun:
                self._goals.execute(GoalRequest(), unlimited=True)

    def deactivate(self) -> None:
        """Stop and be silent; capsule verbs go on working."""
        self._leave('the node was deactivated')

    def shutdown(self, reason: str) -> None:
        """Stop before the end; on_stop is with the sink when this returns. Idempotent."""
        with self._hub.locked():
            self._ended = True
            self._leave(f'shutdown ({reason})')

    def _leave(self, why: str) -> None:
        hub = self._hub
        with hub.locked():
            if hub.active and hub.phase is not Phase.FAULT:
                self._stops.stop(Cause.STOP, Code.STOPPED, why)
            hub.active = False
            self._motion.end_repeat()

    def execute(self, request: GoalRequest | None = None) -> Goal:
        """Begin a goal. One that cannot begin has its result when this returns."""
        with self._hub.locked():
            return self._goals.execute(request or GoalRequest())

    def cancel(self, goal: Goal) -> bool:
        """End a goal for its client; False where it has ended already."""
        with self._hub.locked():
            return self._goals.cancel(goal)

    def start(self) -> Goal:
        """Begin a goal with default limits and no client. Raises the Refusal why not."""
        goal = self.execute()
        if goal.result is not None and goal.result.code is not Code.OK:
            raise Refusal(goal.result.code, goal.result.message)
        return goal

    def stop(self) -> str:
        """End motion; return what on_stop could not do. Raises Refusal in FAULT."""
        with self._hub.locked():
            self._hub.check_usable()
            return self._stops.stop(Cause.STOP, Code.STOPPED, 'stopped')

    def fail(self, message: str) -> None:
        """End motion because something around the runner does not work."""
        with self._hub.locked():
            if self._hub.moving:
                self._stops.fail(Refusal(Code.INTERNAL, message))

    def give_up(self, message: str) -> None:
        """End motion until the node is configured anew, for the same reason."""
        with self._hub.locked():
            self._stops.fault(Refusal(Code.FAULT, message))

    def pause(self) -> str:
        """Stop moving, keep the goal. Raises Refusal unless RUNNING."""
        with self._hub.locked():
            return self._goals.pause('paused; resume to go on')

    def resume(self) -> str:
        """Go on after a pause. Raises Refusal: WRONG_PHASE, PAUSED, INPUT_STALE, FAULT."""
        with self._hub.locked():
            self._goals.resume()
            self._steps.go()
        return ''
