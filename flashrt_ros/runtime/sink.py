"""What the runner is asked and what it tells: requests, answers, records, and the Sink protocol.

The node implements `Sink` with publishers and an action server, offline replay with lists. The
runner calls `publish`, `stop`, `shadow`, `chunk` and `event` under its lock, in the order in which
things happened, so that nothing slips out after a stop; they must not block and must not call the
runner. `goal_done`, `goal_feedback` and `changed` are called without the lock.

Times are ROS time in ns unless a name says otherwise.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.capsule import CapsuleInfo, Event
from flashrt_ros.core.errors import Code
from flashrt_ros.ingest.inbox import LatchEntry
from flashrt_ros.ingest.output import Command
from flashrt_ros.runtime.phases import Phase

DEFAULT_LIMIT_S = 60.0  # of a goal that names none


class Clock:
    """ROS time for stamps and ages, a steady clock for durations. Tests replace both."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns,
                 steady: Callable[[], float] = time.monotonic) -> None:
        self.now_ns = now_ns
        self.steady = steady


@dataclass(frozen=True)
class GoalRequest:
    """Permission to move; the fields of action/ExecutePolicy and their zeros."""

    prompt: str = ''                   # '' keeps the present prompt
    capsule: str = ''                  # '' go on, 'origin' fresh episode, else restore it first
    max_duration_s: float = 0.0        # 0: DEFAULT_LIMIT_S, whose end is LIMIT_REACHED
    max_ticks: int = 0                 # 0: no limit
    shadow: bool = False
    if_epoch: int = 0                  # 0: any; else must equal the present epoch


@dataclass(frozen=True)
class GoalResult:
    """How a goal ended; the result of action/ExecutePolicy."""

    code: Code
    message: str
    ticks: int = 0
    epoch: int = 0
    last: CapsuleInfo = field(default_factory=CapsuleInfo)


@dataclass(frozen=True)
class Feedback:
    """How a goal fares; the feedback of action/ExecutePolicy."""

    phase: Phase
    tick: int
    epoch: int
    queue_depth: int
    input_age_s: float                 # of the observation of the newest tick
    late_ticks: int
    waiting_for: str = ''


class Goal:
    """One goal. `result` is set once, then the callbacks run, without the runner's lock."""

    def __init__(self, request: GoalRequest, *, unlimited: bool = False) -> None:
        self.request = request
        self.unlimited = unlimited     # autorun: no default time limit
        self.result: GoalResult | None = None
        self.started = 0.0             # steady clock; set when motion was permitted
        self.ticks = 0                 # inferences whose chunk was used
        self.acted = False             # its first row was published
        self.cancelled = False         # while its capsule is still read from disk
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Goal], None]] = []

    def add_done_callback(self, fn: Callable[[Goal], None]) -> None:
        """Call `fn(goal)` when it has ended, at once if it has."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(fn)
                return
        fn(self)

    def wait(self, timeout: float | None = None) -> GoalResult | None:
        """Wait for the end; None when the time ran out. Never from the executor's thread."""
        self._done.wait(timeout)
        return self.result if self._done.is_set() else None

    def announce(self) -> None:
        """Let everybody know of `result`. Called once, by the runner."""
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn(self)


@dataclass(frozen=True)
class RewindAnswer:
    """The answer of restore, rollback and reset: RestoreCapsule.Response without success.

    Failure is a `Refusal` whose details have `moved`, `distance`, `limit` (lists) for ROBOT_MOVED.
    """

    info: CapsuleInfo
    epoch: int
    message: str
    moved: tuple[str, ...] = ()        # beyond their limit, yet forced or only warned of
    distance: tuple[float, ...] = ()
    limit: tuple[float, ...] = ()


@dataclass(frozen=True)
class ChunkRecord:
    """The raw output of one accepted inference; the fields of msg/ActionChunk.

    `used` says whether its rows entered the queue: late chunks and those of a passed epoch did not.
    """

    output: str
    stamp_ns: int                      # of the observation
    start_ns: int                      # when row 0 is due
    session: int
    epoch: int                         # in which its inference was started
    tick: int                          # number of the inference since origin, from 1
    step: int                          # steps executed when it latched its inputs
    step_s: float
    names: tuple[str, ...]
    data: NDArray[np.float64]          # (horizon, names): before scale, offset and clip
    latched: tuple[LatchEntry, ...]
    used: bool = True


@dataclass(frozen=True)
class StatusSnapshot:
    """The fields of msg/PolicyStatus."""

    phase: Phase
    waiting_for: str
    prompt: str
    session: int
    epoch: int
    tick: int
    step: int
    queue_depth: int
    late_ticks: int
    dropped_chunks: int
    dropped_rows: int
    clipped: int
    rejected_inputs: int
    tick_p50_s: float
    tick_p99_s: float
    restore_bound_s: float
    capsules: int
    capsule_bytes: int
    last_refusal: str
    exact: bool
    nominal_step_hz: float = 0.0
    step_hz: float = 0.0
    step_hz_wall: float = 0.0
    missed_steps: int = 0
    inference_s: float = 0.0
    max_tick_s: float = 0.0
    guard_process: str = ''
    ended_code: Code = Code.OK
    ended: str = ''
    dropped_logs: int = 0


class Sink(Protocol):
    """Where everything that leaves the runner goes."""

    def publish(self, output: str, command: Command) -> None:
        """Send one action. Under the lock."""

    def stop(self, output: str, command: Command) -> None:
        """Send an output's on_stop. Under the lock."""

    def shadow(self, output: str, command: Command) -> None:
        """Report an action that a shadow goal would have sent. Under the lock."""

    def chunk(self, record: ChunkRecord) -> None:
        """Record one inference. Without the lock."""

    def event(self, event: Event) -> None:
        """Tell of a change of the store, a rewind or a refusal. Any thread."""

    def changed(self) -> None:
        """Something that the status shows has changed. Without the lock."""

    def goal_done(self, goal: Goal, result: GoalResult) -> None:
        """A goal has ended. Without the lock."""

    def goal_feedback(self, goal: Goal, feedback: Feedback) -> None:
        """How the running goal fares, at the rate of `Runner.poll`. Without the lock."""


class NullSink:
    """Throws everything away; a base for sinks that want only some of it."""

    def publish(self, output: str, command: Command) -> None:
        """Do nothing."""

    def stop(self, output: str, command: Command) -> None:
        """Do nothing."""

    def shadow(self, output: str, command: Command) -> None:
        """Do nothing."""

    def chunk(self, record: ChunkRecord) -> None:
        """Do nothing."""

    def event(self, event: Event) -> None:
        """Do nothing."""

    def changed(self) -> None:
        """Do nothing."""

    def goal_done(self, goal: Goal, result: GoalResult) -> None:
        """Do nothing."""

    def goal_feedback(self, goal: Goal, feedback: Feedback) -> None:
        """Do nothing."""
