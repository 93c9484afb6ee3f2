"""A policy outside of time: the same runner as in the node, stepped by whoever holds it.

Its clock stands where it was set, ticks run on the caller's thread, and a tick can be held back, so
that what a live run did in whatever order can be done again. Permission to move is not asked for:
guard, enable and autorun are left out of the policy file, which changes nothing of its meaning.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrt_ros.core.capsule import CapsuleInfo, Event, EventKind
from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.session import Options
from flashrt_ros.core.worker import Worker
from flashrt_ros.ingest import policy_file as files
from flashrt_ros.ingest.inbox import Arrival
from flashrt_ros.ingest.output import Command
from flashrt_ros.ingest.spec import GuardSpec, PolicyFile
from flashrt_ros.runtime.build import build
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import ChunkRecord, Clock, GoalRequest, NullSink

FOREVER_S = 1e9


class Pump(Worker):
    """Runs jobs on the caller's thread, at once or, while held, when it is released."""

    def __init__(self) -> None:
        super().__init__('flashrt-replay', threaded=False)
        self.around: Callable[[bool], AbstractContextManager[None]] | None = None
        self._held = False
        self._waiting: list[Callable[[], None]] = []

    def _do(self, job: Callable[[], None], *, late: bool) -> None:
        """Run one job, inside of `around(late)` where somebody watches."""
        if self.around is None:
            super().post(job)
        else:
            with self.around(late):
                super().post(job)

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` now, or after all that wait."""
        if self._held:
            self._waiting.append(job)
        else:
            self._do(job, late=False)

    def hold(self) -> None:
        """Let jobs wait from now on, as if the device were slow."""
        self._held = True

    def release(self) -> None:
        """Run what waits, in order, and go on at once."""
        self._held = False
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._do(job, late=True)


@dataclass(frozen=True)
class Sent:
    """One command that left the policy. `stop`: an on_stop; `between`: interpolated, no row."""

    output: str
    step: int                          # steps executed before it
    time_ns: int
    command: Command
    stop: bool = False
    between: bool = False


class Collector(NullSink):
    """Keeps what leaves the runner, in order."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.chunks: list[ChunkRecord] = []
        self.refused: list[Event] = []
        self.runner: Offline | None = None
        self.between = False

    def _note(self, output: str, command: Command, *, stop: bool) -> None:
        runner = self.runner
        assert runner is not None
        self.sent.append(Sent(output, runner.session.step, runner.clock.ns, command, stop,
                              self.between))

    def publish(self, output: str, command: Command) -> None:
        """Keep an action."""
        self._note(output, command, stop=False)

    def stop(self, output: str, command: Command) -> None:
        """Keep an on_stop."""
        self._note(output, command, stop=True)

    def chunk(self, record: ChunkRecord) -> None:
        """Keep one output of one inference."""
        self.chunks.append(record)

    def event(self, event: Event) -> None:
        """Keep refusals."""
        if event.kind is EventKind.REFUSED:
            self.refused.append(event)


class StandingClock(Clock):
    """Says what it was told; durations do not pass."""

    def __init__(self, ns: int = 1_000_000_000) -> None:
        super().__init__(lambda: self.ns, lambda: 0.0)
        self.ns = ns


class Offline(Runner):
    """A runner that is stepped by hand. `open_policy` makes one."""

    clock: StandingClock
    pump: Pump
    sink: Collector
    accept_inexact = False             # capsules of another build may be gone on from

    def begin(self, prompt: str = '', *, shadow: bool = False) -> None:
        """Give permission to move, without a limit. Raises the Refusal why not."""
        goal = self.execute(GoalRequest(prompt=prompt, max_duration_s=FOREVER_S, shadow=shadow))
        if goal.result is not None:
            raise Refusal(goal.result.code, goal.result.message)

    @property
    def moving(self) -> bool:
        """Whether steps are executed."""
        return self._hub.moving

    @property
    def waiting_for(self) -> str:
        """What keeps the first step from being taken."""
        return self._hub.waiting_for

    @property
    def has_pending(self) -> bool:
        """Whether a boundary's inference is to be started again."""
        return self._hub.pending is not None

    @property
    def would_start(self) -> bool:
        """Whether the next step would start an inference."""
        hub = self._hub
        return hub.flight is None and (hub.pending is not None or hub.queue.wants_inference())

    @property
    def started(self) -> int:
        """Inferences that were started and are recorded, or will be."""
        flight = self._hub.flight
        return (len(self.sink.chunks) // len(self.file.outputs)
                + (flight is not None and not flight.prefill))

    def hear(self, topic: str, msg: Any, digest: Callable[[], int]) -> None:
        """Take in a message without a step, as in HOLD: a newer one has replaced it since."""
        with self._hub.locked():
            self.observation.receive(topic, msg, Arrival(self.clock.ns, self._hub.clock_epoch),
                                     digest)
            while self.observation.take():
                pass

    def period(self) -> None:
        """Let the timer tick for one step; nothing in lock step, where messages do that."""
        if not self._hub.lock_step:
            for part in range(self._motion.parts):
                self.sink.between = part > 0
                self.timer()
            self.sink.between = False

    def halt(self) -> None:
        """End motion: drop the queue and an inference under way, send on_stop."""
        if self.moving:
            self.stop()

    def end_inference(self) -> None:
        """Let an inference under way end, whose chunk nobody waits for any more."""
        if self._hub.flight is not None:
            self.halt()
        self.pump.release()
        self.poll()

    def rewind(self, name: str, *, keep: bool = False) -> CapsuleInfo:
        """Return to a capsule, in HOLD. Raises Refusal.

        `keep`: with queue and inference in flight, as if the boundary had never been left; without
        it the next row is computed anew, as in a live restore.
        """
        hub = self._hub
        with hub.locked():
            plan = self.session.plan_restore(name, accept_inexact=self.accept_inexact)
            self.halt()
            future = self.session.apply(plan)
            hub.flight = hub.pending = None
            hub.begun = hub.owed = hub.prefill = False
            hub.latched.clear()
            hub.fresh_ns = 0
            hub.mark = plan.mark
            if keep:
                hub.pending = self.session.pending_after_restore
            else:
                hub.queue.flush()
        return future.result()

    def resume_at(self, name: str) -> CapsuleInfo:
        """Go on from a capsule as if its run had never been interrupted. Raises Refusal."""
        info = self.rewind(name, keep=True)
        self.begin()
        self._hub.publishing = self.session.step > 0    # limits go on from the last command
        return info


def unguarded(file: PolicyFile) -> PolicyFile:
    """Return a policy file without what only decides when a robot may move."""
    return replace(file, enable=None, guard=GuardSpec(), run=replace(
        file.run, autorun=False, persist_on=(), on_restore='hold', on_clock_jump='keep'))


def open_policy(path: Path | PolicyFile, *, model_root: Path | None = None,
                modules: Sequence[str] = (), verify: bool = True, directory: Path | None = None,
                trigger: Sequence[str] = ()) -> Offline:
    """Load a policy file and configure it for stepping by hand, in HOLD. Raises Refusal.

    `trigger` replaces the policy file's trigger by lock step on these topics.
    """
    file = path if isinstance(path, PolicyFile) else files.load(
        path, model_root=model_root, modules=modules)
    file = unguarded(file)
    if trigger:
        file = replace(file, run=replace(file.run, trigger=tuple(trigger), publish_hz=None))
    clock, pump, sink = StandingClock(), Pump(), Collector()
    runner = build(
        file, sink, model_root=model_root, modules=modules, clock=clock, kind=Offline, worker=pump,
        options=Options(threaded=False, verify=verify, directory=directory, max_capsules=1 << 16,
                        host_bytes=64 << 30))
    runner.clock, runner.pump, runner.sink, sink.runner = clock, pump, sink, runner
    runner.activate()
    return runner
