"""Cell and runner in one process, in lock step with each other, as fast as the machine is.

The same policy file, the same runner and the same messages as in the node, without ROS, without
threads and without a wall clock: a step feeds what the sensors say, calls the runner's timer, whose
answer goes through the sink to the fake controller, and lets physics go on for 50 ms of simulated
time. Equal calls give equal bytes.

The runner is driven by its timer and not by messages (`trigger: input`), because that is what a
robot does: the guard asks for the witness, a restore flushes the queue, and the first action comes
from a new inference on the restored state. With `trigger: input` a restore goes on in the middle of
a chunk, which is right for a simulator whose physics goes back too, and wrong for an arm that a
person has driven back and that now stands still.
"""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.session import Options
from flashrt_ros.demo.arm import JOINTS, PERIOD_S, Cell, Task
from flashrt_ros.demo.rollout import POLICY_FILE
from flashrt_ros.ingest.output import Command
from flashrt_ros.runtime.build import build
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import Clock, Goal, GoalRequest, NullSink

Vector = NDArray[np.float64]


class CellSink(NullSink):
    """Gives commands to the cell at once and keeps a log of them."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.sent: list[tuple[str, Vector]] = []     # (output, values) of this step

    def publish(self, output: str, command: Command) -> None:
        """An action."""
        self.sent.append((output, command.values.copy()))
        if output == 'arm':
            self.cell.command(command.values, command.time_s)
        else:
            self.cell.grip = float(command.values[0])

    def stop(self, output: str, command: Command) -> None:
        """The end of motion."""
        self.publish(output, command)


class Bench:
    """A served policy and its cell. `directory` keeps durable capsules. `close` frees the runner.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.cell = Cell()
        self.sink = CellSink(self.cell)
        self.steps = 0
        self.lit = False
        self.enabled = True
        self.runner: Runner = self._build()

    def _build(self) -> Runner:
        runner: Runner = build(POLICY_FILE, self.sink, options=Options(
            threaded=False, directory=self.directory), clock=Clock(
                lambda: round(self.now * 1e9), lambda: self.now))
        runner.activate()
        return runner

    def restart(self) -> None:
        """End the policy and start it anew, as if its process had died. The cell stays."""
        self.runner.close()
        self.runner = self._build()
        self._feed_enable()

    @property
    def now(self) -> float:
        """Simulated seconds since construction; 1 s is added, for 0 is no stamp."""
        return 1.0 + self.steps * PERIOD_S

    def begin(self, task: Task) -> None:
        """Reset cell and policy, light the lamp, forget all capsules. Nothing moves yet."""
        if self.runner.phase is not Phase.HOLD:
            self.runner.stop()
        self.runner.reset().result(0)
        for info in self.runner.list():
            if info.name != 'origin':
                self.runner.drop(info.name)
        self.cell.reset(task)
        self.lit, self.enabled = True, True
        self._feed_enable()

    def go(self, capsule: str = '') -> Goal:
        """Give permission to move."""
        return self.runner.execute(GoalRequest(capsule=capsule, max_duration_s=1e6))

    def step(self) -> None:
        """Let 50 ms pass."""
        self.steps += 1
        self.sink.sent.clear()
        self._feed_enable()
        for topic, message in self.messages().items():
            self.runner.feed(topic, message)
        self.runner.timer()
        if self.sink.sent:
            self.lit = False
        self.cell.step()

    def _feed_enable(self) -> None:
        enable = self.runner.file.enable
        if enable is not None:
            self.runner.feed(enable.topic, SimpleNamespace(data=self.enabled))

    def messages(self) -> dict[str, Any]:
        """Return what the sensors say, as messages by topic."""
        cell = self.cell
        cue = [0.0, 0.0, 0.0]
        if self.lit:
            cue[cell.task.target] = 1.0
        sec, nanosec = divmod(round(self.now * 1e9), 10**9)
        header = SimpleNamespace(stamp=SimpleNamespace(sec=sec, nanosec=nanosec), frame_id='')
        return {
            'joint_states': SimpleNamespace(
                header=header, name=[*JOINTS, 'finger'], effort=[],
                position=[*cell.joints.tolist(), cell.finger],
                velocity=[*cell.joint_velocities.tolist(), 0.0]),
            'part_in_hand': SimpleNamespace(data=cell.seen.tolist()),
            'cue': SimpleNamespace(data=cue)}

    def close(self) -> None:
        """Free the runner."""
        self.runner.close()
