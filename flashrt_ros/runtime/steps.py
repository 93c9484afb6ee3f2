"""The step logic: when a step happens, when an inference starts, and when its chunk is spliced.

A step is due when the timer ticked, or, in lock step, when a set of messages is complete. It
latches the inputs, starts an inference where `start_at` or fewer rows are left, splices the chunk
that is due, takes one row from the queue, publishes it and commits a boundary. Where a step needs a
chunk that is not there yet it stays *begun*; the inference's completion, on the device thread,
takes the lock and goes on. Nothing waits.

Counting, not clocks: a chunk is spliced `latency_steps` executed steps after its start, or, where
the queue ran empty before, as soon as it is there, and as many rows are skipped as were really
published since. So with equal inputs per step the actions are equal, however fast the machine is.
"""
from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

from numpy.typing import NDArray

from flashrt_ros.core.capsule import Latch, Mark
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.output import F64
from flashrt_ros.runtime.chunks import Chunks
from flashrt_ros.runtime.goals import Goals
from flashrt_ros.runtime.hub import Flight, Hub
from flashrt_ros.runtime.motion import Motion
from flashrt_ros.runtime.stops import Stops

Arrays = Mapping[str, NDArray[Any]]


class Steps:
    """Carries steps as far as they get without waiting."""

    def __init__(self, hub: Hub, motion: Motion, stops: Stops, goals: Goals,
                 chunks: Chunks) -> None:
        self._hub = hub
        self._motion = motion
        self._stops = stops
        self._goals = goals
        self._chunks = chunks
        self._period_ns = round(hub.file.policy.period_s * 1e9)
        self._going = False

    def owe(self) -> None:
        """The timer ticked. A tick during a step that waits for its chunk adds no step."""
        self._hub.owed = not self._hub.begun
        self.go()

    def go(self) -> None:
        """Carry on as far as possible. Called under the lock, whenever something has changed."""
        if self._going:                # an unthreaded inference has finished inside submit
            return
        self._going = True
        try:
            while self._once():
                pass
        except Refusal as error:
            self._stops.fail(error)
        except Exception as error:
            self._stops.bug(error)
        finally:
            self._going = False

    def _once(self) -> bool:
        """Do one thing; return whether there may be more to do."""
        hub = self._hub
        flight = hub.flight
        if flight is not None and flight.doomed and flight.inference.done:
            self._drop(flight)
            return True
        if not hub.begun and not self._begin():
            return False
        if hub.flight is None and self._wants_inference():
            self._start()
        flight = hub.flight
        if flight is not None and not flight.doomed and self._due(flight):
            if not flight.inference.done:
                return False
            self._land(flight)
            return True
        if hub.queue.left:
            return self._finish()
        return False                   # a doomed inference must end first

    # -- the beginning of a step ----------------------------------------------------------

    def _begin(self) -> bool:
        """Latch the inputs of a step that is due; return whether a step has begun."""
        hub = self._hub
        if hub.lock_step:
            self._take()
        if not (hub.owed and hub.moving) or hub.rewinding:
            return False
        if hub.flight is not None and hub.flight.doomed and not hub.queue.left:
            return False               # its completion comes back here
        now = hub.clock.now_ns()
        missing = hub.observation.missing(now, hub.fresh_ns)
        if missing:
            text = '; '.join(map(str, missing))
            if hub.goal is not None and hub.goal.acted:
                raise Refusal(Code.INPUT_STALE, text)
            hub.owed = hub.lock_step   # in lock step another topic may still complete the set
            hub.wait_for(text)
            return False
        hub.wait_for('')
        if not self._goals.permitted():
            return False
        hub.begin_step(now)
        return True

    def _take(self) -> None:
        """Let the next set of messages into the inbox, unless one there was not used yet.

        In HOLD and PAUSED, and while a goal waits for its first inputs, newer sets replace it.
        """
        hub = self._hub
        idle = not hub.moving or bool(hub.waiting_for)
        while (idle or not hub.owed) and hub.observation.take():
            hub.owed = True
            if not hub.moving:
                self._motion.repeat()

    def _wants_inference(self) -> bool:
        hub = self._hub
        if hub.pending is not None:
            return True
        goal = hub.goal
        limit = goal.request.max_ticks if goal is not None else 0
        return hub.queue.wants_inference() and not (
            limit and goal is not None and goal.ticks >= limit)

    def _start(self) -> None:
        """Start an inference on the latched inputs, or again the one that a boundary holds."""
        hub = self._hub
        observation = hub.observation
        pending, hub.pending = hub.pending, None
        prefill = hub.prefill and pending is None
        latched, start_ns = tuple(hub.latched), hub.step_ns
        if pending is not None:
            latch = pending
            mark = Mark(latch.stamp_ns, hub.mark.witness, hub.mark.witness_stamps)
            latched = ()
            start_ns -= (hub.session.step - latch.step) * self._period_ns
        else:
            latch = Latch(step=hub.session.step, stamp_ns=observation.stamp_ns)
            mark = Mark(latch.stamp_ns, *observation.witness())
            observation.write(hub.session.inputs, self._prefix())
            if self._relative:
                hub.queue.latch(observation.joints())
        if prefill:
            latched = ()
        elif pending is None:
            hub.latched.clear()
        inference = hub.session.submit(latch, prefill=prefill)
        hub.flight = flight = Flight(inference, latch.step, start_ns, mark, latched,
                                     observation.prompt, prefill, pending=pending)
        inference.add_done_callback(functools.partial(self._done, flight))

    @functools.cached_property
    def _relative(self) -> bool:
        return any(o.relative for o in self._hub.file.outputs.values())

    def _prefix(self) -> dict[str, F64] | None:
        """Return the rows still to be executed, of outputs whose term asks for them."""
        hub = self._hub
        left = hub.queue.left
        if not hub.observation.prefixes or not left:
            return None
        joints = hub.observation.joints()
        return {n: hub.queue.remaining(left, n, joints) for n in hub.observation.prefixes}

    def _done(self, flight: Flight, _: object) -> None:
        """On the device thread: an inference has finished."""
        with self._hub.locked():
            if self._hub.flight is flight:     # else a rewind has discarded it
                if flight.inference.error is not None:
                    self._stops.fault(flight.inference.error)
                else:
                    self.go()

    # -- the end of an inference ----------------------------------------------------------

    def _due(self, flight: Flight) -> bool:
        """Whether this step cannot go on without the chunk; live, doom one that is late."""
        hub = self._hub
        if not hub.queue.due(hub.session.step - flight.step):
            return False
        if hub.lock_step or flight.inference.done or not hub.queue.left:
            return True
        flight.doomed = 'late'
        hub.count.late_ticks += 1
        hub.changed()
        return False

    def _land(self, flight: Flight) -> None:
        """Accept a tick and splice its chunk."""
        hub = self._hub
        outputs = self._accept(flight)
        if flight.prefill:
            hub.prefill = False
            return
        self._chunks.record(flight, outputs, used=True)
        hub.queue.splice(outputs, hub.session.step - flight.step, tick=hub.session.tick)
        if hub.goal is not None:
            hub.goal.ticks += 1

    def _drop(self, flight: Flight) -> None:
        """Accept a tick whose chunk came too late or in a passed epoch."""
        hub = self._hub
        outputs = self._accept(flight)
        if flight.prefill:
            hub.prefill = hub.prefill and flight.prompt != hub.observation.prompt
            return
        if flight.doomed == 'epoch':
            hub.count.dropped_chunks += 1
            hub.changed()
        self._chunks.record(flight, outputs, used=False)

    def _accept(self, flight: Flight) -> Arrays:
        hub = self._hub
        hub.flight = None
        outputs = hub.session.accept(flight.inference)
        hub.mark = flight.mark
        return outputs

    # -- the end of a step ----------------------------------------------------------------

    def _finish(self) -> bool:
        """Take one row, publish it, commit the boundary; return whether to go on."""
        hub = self._hub
        if not self._goals.permitted():        # enable was lost, or time is up, while it waited
            return False
        row = self._motion.act()
        hub.observation.set_last_action(row)
        hub.begun = False
        flight = hub.flight
        pending = None
        keeps = hub.lock_step or bool(hub.file.run.persist_on)
        if keeps and flight is not None and not flight.doomed:
            # live, a restore starts from fresh inputs; only a replay from a file asks for these
            if flight.pending is None:
                flight.pending = Latch({n: a.tobytes() for n, a in hub.session.inputs.items()},
                                       flight.step, flight.mark.stamp_ns)
            pending = flight.pending
        hub.session.commit_step(hub.mark, pending)
        self._goals.over()
        return hub.moving
