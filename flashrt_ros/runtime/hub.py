"""What the parts of a runner share, under one lock.

The lock is re-entrant and is never held across an inference, a device call or a file operation
(an unthreaded session runs the inference inside submit; there the caller is alone). What must be
told without it, for example that a goal has ended, is put on a list with `later` and carried out
when the outermost holder lets go, in order. Counters count since configure; they are not STATE.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
import logging
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.capsule import CapsuleInfo, Event, EventKind, Latch, Mark
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.inference import Inference
from flashrt_ros.core.saving import MAX_NOTE
from flashrt_ros.core.session import Session
from flashrt_ros.ingest.actions import ActionQueue
from flashrt_ros.ingest.inbox import LatchEntry
from flashrt_ros.ingest.observation import Observation
from flashrt_ros.ingest.output import OutputMap
from flashrt_ros.ingest.spec import PolicyFile
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.runtime.sink import Clock, Goal, Sink

log = logging.getLogger('flashrt_ros.runtime')


@dataclass
class Counters:
    """What is counted since configure; the fields of msg/PolicyStatus."""

    late_ticks: int = 0                # chunks that missed their splice step
    dropped_chunks: int = 0            # chunks whose epoch had passed
    dropped_rows: int = 0              # rows flushed by restores, stops and prompt changes
    clipped: int = 0
    rejected_inputs: int = 0


@dataclass(eq=False)
class Flight:
    """An inference under way and what must be known when it lands."""

    inference: Inference
    step: int                          # steps executed when its inputs were latched
    start_ns: int                      # when row 0 is due
    mark: Mark
    latched: tuple[LatchEntry, ...]
    prompt: str
    prefill: bool = False
    doomed: str = ''                   # 'late' or 'epoch': the tick counts, its chunk is dropped
    pending: Latch | None = None       # its inputs' bytes, once a boundary needed them


class _Holding:
    """Hub.locked(): several times a step, and so no generator."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def __enter__(self) -> None:
        hub = self._hub
        hub.lock.acquire()
        hub._depth += 1

    def __exit__(self, *_: object) -> None:
        hub = self._hub
        hub._depth -= 1
        outermost = hub._depth == 0
        hub.lock.release()
        if outermost and (hub._later or hub._changed):
            hub._run_later()


@dataclass(eq=False)
class Hub:
    """The present of one runner. Everything here is read and written under `lock`."""

    file: PolicyFile
    session: Session
    observation: Observation
    queue: ActionQueue
    outputs: Mapping[str, OutputMap]
    sink: Sink
    clock: Clock
    allow_force: bool = False
    phase: Phase = Phase.HOLD
    active: bool = False
    goal: Goal | None = None
    flight: Flight | None = None
    pending: Latch | None = None       # in flight at the restored boundary: start it again
    mark: Mark = field(default_factory=Mark)       # of the newest accepted tick
    latched: list[LatchEntry] = field(default_factory=list)  # since the newest tick's latch
    begun: bool = False                # a step has latched and is not yet executed
    owed: bool = False                 # a timer tick, or a set of messages, without its step
    step_ns: int = 0                   # when the newest step latched
    publishing: bool = False           # the first row since motion was permitted is out
    rewinding: int = 0                 # restores whose copy is under way: no inference starts
    prefill: bool = False              # a new prompt was not yet taken in
    fresh_ns: int = 0                  # inputs must have arrived after this
    clock_epoch: int = 0               # backward jumps of ROS time so far
    rewound: float = float('-inf')     # steady time of the last rewind that was asked for
    waiting_for: str = ''
    last_refusal: str = ''
    fault: Refusal | None = None
    count: Counters = field(default_factory=Counters)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _depth: int = 0
    _later: deque[Callable[[], None]] = field(default_factory=deque)
    _changed: bool = False

    def __post_init__(self) -> None:
        self._holding = _Holding(self)
        self.lock_step = self.file.run.lock_step
        # whether a rewind leaves the phase as it is
        self.goes_on = self.lock_step and self.file.run.on_restore == 'continue'
        # of the observation, as they were before the step that has begun
        self._steps: list[tuple[NDArray[Any], NDArray[Any]]] = [
            (a, a.copy()) for a in (self.session.host[s.name] for s in self.observation.specs())]

    @property
    def moving(self) -> bool:
        """Whether steps are executed."""
        return self.phase is Phase.RUNNING or self.phase is Phase.SHADOW

    # -- the lock -------------------------------------------------------------------------

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock; whoever lets go last carries out what was put off."""
        return self._holding

    def _run_later(self) -> None:
        while True:
            with self.lock:
                if self._depth:
                    return                     # taken up again by a later holder
                if self._later:
                    job = self._later.popleft()
                elif self._changed:
                    self._changed = False
                    job = self.sink.changed
                else:
                    return
            try:
                job()
            except Exception:                  # a caller's callback must not end our thread
                log.exception('a callback failed')

    def later(self, job: Callable[[], None]) -> None:
        """Run `job` when the lock has been let go. Called under the lock."""
        self._later.append(job)

    def changed(self) -> None:
        """Tell the sink, once the lock has been let go, that the status has changed."""
        self._changed = True

    # -- a step that has begun ------------------------------------------------------------

    def begin_step(self, now_ns: int) -> None:
        """Latch the inputs of one step."""
        for array, before in self._steps:
            np.copyto(before, array)
        self.latched += self.observation.latch(now_ns, self.session.step)
        self.step_ns = now_ns
        self.begun = True
        self.owed = False

    def forget_step(self) -> None:
        """Undo a step that has begun and will not be executed: it never was one.

        Its messages stay in the record: they are what the next step will find in the inbox.
        """
        if self.begun:
            for array, before in self._steps:
                np.copyto(array, before)
            self.begun = False
            self.owed = self.lock_step         # its set of messages was not used

    # -- telling --------------------------------------------------------------------------

    def wait_for(self, what: str) -> None:
        """Say what keeps a running goal from its first action; '' for nothing."""
        if what != self.waiting_for:
            self.waiting_for = what
            self.changed()

    def refused(self, error: Refusal, info: CapsuleInfo | None = None) -> None:
        """Remember a refusal for the status and tell of it."""
        self.last_refusal = str(error)
        self.sink.event(Event(EventKind.REFUSED, info or CapsuleInfo(), self.session.epoch,
                              error.code, error.message))
        self.changed()
        self.keep('refusal', str(error))

    def keep(self, occasion: str, note: str) -> None:
        """Save and persist the newest boundary where `persist_on` names the occasion."""
        if occasion in self.file.run.persist_on and self.session.fault is None:
            self.later(lambda: self._keep(f'{occasion}: {note}'[:MAX_NOTE]))

    def _keep(self, note: str) -> None:
        try:
            self.session.save(note=note, persist=True)
        except Refusal as error:
            with self.locked():
                self.last_refusal = str(error)

    def check_usable(self) -> None:
        """Refuse what a node in FAULT cannot do."""
        if self.phase is Phase.FAULT:
            why = f' ({self.fault.message})' if self.fault is not None else ''
            raise Refusal(Code.FAULT, f'the node is in FAULT{why}; clean up and configure it')
