"""Drives an ActionQueue as a runner does, with inferences as slow as a test wants them.

Row i of inference k is 1000 k + i, in the first column; so a published row says whose it is. The
rules are those of the design: an inference starts when `start_at` or fewer rows are left; it is
spliced when `latency_steps` rows were executed since, or as soon as the queue is empty.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.layout import BufferSpec, Role
from flashrt_ros.ingest.actions import ActionQueue, allocate
from flashrt_ros.ingest.output import Joints
from flashrt_ros.ingest.spec import ModelSpec, OutputSpec, PolicyFile, RunSpec

Arrays = dict[str, NDArray[Any]]


def make_queue(horizon: int = 4, dim: int = 2, dtype: str = 'F32', *,
               outputs: Mapping[str, dict[str, Any]] | None = None, **run: Any
               ) -> tuple[ActionQueue, Arrays]:
    """Return a queue bound to memory of its own, and that memory."""
    specs = {name: OutputSpec(name, f'outputs.{name}', name, 'std_msgs/msg/Float64MultiArray',
                              **{'kind': 'raw', 'port': 'actions', **changes})
             for name, changes in (outputs or {'arm': {}}).items()}
    pf = PolicyFile('walk.yaml', ModelSpec('host', 0.1), RunSpec(**run), {}, specs)
    ports = {'actions': BufferSpec('actions', (1, horizon, dim), dtype, Role.OUTPUT)}
    queue = ActionQueue(pf, ports)
    host = allocate(queue.specs(), queue.initial())
    queue.bind(host)
    return queue, host


def numbered(k: int, horizon: int, dim: int = 2) -> Arrays:
    """Return the outputs of inference k: row i is 1000 k + i, then that divided by 8."""
    rows = 1000.0 * k + np.arange(horizon)
    table = np.stack([rows, *(rows / 8 for _ in range(dim - 1))], axis=1)
    return {'actions': table.astype(np.float32)[None]}


@dataclass(frozen=True)
class Flight:
    """An inference under way; `number` decides what it gives."""

    number: int
    started: int               # rows executed when it latched
    ready: int = 0             # steps until it is done
    late: bool = False


@dataclass(frozen=True)
class Boundary:
    """What a capsule would hold."""

    host: Mapping[str, bytes]
    flight: Flight | None
    count: int


@dataclass
class Runner:
    """The step rules over a queue. `model` gives the outputs of an inference by its number."""

    queue: ActionQueue
    host: Arrays
    model: Callable[[int], Arrays]
    lock_step: bool = True
    joints: Joints = field(default_factory=dict)
    flight: Flight | None = None
    count: int = 0             # inferences started; returns with a restore in lock step
    dropped: int = 0           # late chunks
    started: dict[int, int] = field(default_factory=dict)    # number -> rows executed then

    def step(self, delay: int = 0) -> dict[str, NDArray[Any]] | None:
        """Execute one step; None where, live, the queue is empty and the chunk not there yet.

        An inference that starts in this step takes `delay` steps.
        """
        queue = self.queue
        flight = self.flight
        if flight is not None and flight.late and not flight.ready:
            self.flight = flight = None            # too late for its splice: dropped
            self.dropped += 1
        if flight is None and queue.wants_inference():
            flight = Flight(self.count, queue.rows_executed, delay)
            self.started[self.count] = queue.rows_executed
            self.count += 1
            queue.latch(self.joints)
        elif flight is not None:
            flight = replace(flight, ready=max(0, flight.ready - 1))
        self.flight = flight
        if flight is not None and queue.due(queue.rows_executed - flight.started):
            if self.lock_step or not flight.ready:
                if not flight.late or not queue.left:
                    queue.splice(self.model(flight.number), queue.rows_executed - flight.started,
                                 tick=flight.number)
                    self.flight = None
            elif not queue.left:
                return None
            else:
                self.flight = replace(flight, late=True)
        return queue.pop() if queue.left else None

    def save(self) -> Boundary:
        return Boundary({n: a.tobytes() for n, a in self.host.items()}, self.flight, self.count)

    def restore(self, kept: Boundary) -> None:
        """Return to a boundary: in lock step whole, live with an empty queue and no inference."""
        for name, array in self.host.items():
            array[...] = np.frombuffer(kept.host[name], array.dtype).reshape(array.shape)
        self.flight = None
        if self.lock_step:
            self.flight, self.count = kept.flight, kept.count
        else:
            self.queue.flush()
