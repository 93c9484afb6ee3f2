"""A runner with a simulated clock, a recording sink and a robot that says what it is told to."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import copy
from pathlib import Path
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.errors import Code
from flashrt_ros.core.session import Options
from flashrt_ros.ingest.output import Command
from flashrt_ros.runtime.build import build
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import (
    ChunkRecord,
    Clock,
    Feedback,
    Goal,
    GoalRequest,
    GoalResult,
    NullSink,
)

S = 1_000_000_000
MODULE = 'test.runtime.policies'
JOINTS = ['a', 'b', 'c']

NUMBERED: dict[str, Any] = {
    'policy': {'backend': 'host', 'factory': f'{MODULE}:numbered', 'period_s': 0.02,
               'options': {'obs_dim': 3, 'action_dim': 2, 'horizon': 5}},
    'run': {'trigger': 'timer'},
    'inputs': {'obs': [{'term': 'joint_position', 'topic': 'joint_states', 'joints': JOINTS,
                        'max_age_s': 0.5}]},
    'outputs': {'actions': {'topic': 'action', 'type': 'std_msgs/msg/Float64MultiArray',
                            'kind': 'raw'}},
}
ENABLED = {'enable': {'topic': 'enable', 'max_age_s': 0.2}}
LOCK_STEP = {'trigger': {'input': ['joint_states']}, 'on_restore': 'continue'}

ARM: dict[str, Any] = {
    'policy': {'backend': 'host', 'factory': f'{MODULE}:arm', 'period_s': 0.02,
               'options': {'joints': 3, 'horizon': 4}},
    'run': {'trigger': 'timer'},
    'inputs': {'q': [{'term': 'joint_position', 'topic': 'joint_states', 'joints': JOINTS,
                      'max_age_s': 0.1}]},
    'outputs': {'arm': {
        'topic': 'arm/joint_trajectory', 'type': 'trajectory_msgs/msg/JointTrajectory',
        'kind': 'position', 'joints': JOINTS, 'port': 'actions', 'start_tolerance': 0.1,
        'on_stop': {'do': 'hold', 'time_s': 0.1}}},
    'guard': {'witness': {'joint_position': {'max': 0.2, 'forceable': True},
                          'c': {'max': 0.05}}, 'max_age_s': 60},
}

PROMPTED: dict[str, Any] = {
    'policy': {'backend': 'host', 'factory': f'{MODULE}:prompted', 'period_s': 0.02},
    'run': {'trigger': 'timer'},
    'inputs': {'obs': [{'term': 'joint_position', 'topic': 'joint_states', 'joints': JOINTS}],
               'prompt': [{'term': 'prompt', 'topic': 'prompt', 'encode': 'bytes', 'length': 8}]},
    'outputs': NUMBERED['outputs'],
}


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with nested values replaced; `...` removes a key."""
    data = copy.deepcopy(dict(base))
    for change in changes:
        for key, value in change.items():
            if value is ...:
                data.pop(key, None)
            elif isinstance(value, Mapping) and isinstance(data.get(key), Mapping):
                data[key] = merged(data[key], value)
            else:
                data[key] = copy.deepcopy(value)
    return data


class Recorder(NullSink):
    """Keeps everything in order; `wait` waits for what a test has caused."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, Command]] = []     # publish, stop, shadow
        self.chunks: list[ChunkRecord] = []
        self.events: list[Event] = []
        self.done: list[tuple[Goal, GoalResult]] = []
        self.feedback: list[Feedback] = []
        self._news = threading.Condition()

    def _note(self, where: list[Any], what: Any) -> None:
        with self._news:
            where.append(what)
            self._news.notify_all()

    def publish(self, output: str, command: Command) -> None:
        self._note(self.log, ('publish', output, command))

    def stop(self, output: str, command: Command) -> None:
        self._note(self.log, ('stop', output, command))

    def shadow(self, output: str, command: Command) -> None:
        self._note(self.log, ('shadow', output, command))

    def chunk(self, record: ChunkRecord) -> None:
        self._note(self.chunks, record)

    def event(self, event: Event) -> None:
        self._note(self.events, event)

    def changed(self) -> None:
        with self._news:
            self._news.notify_all()

    def goal_done(self, goal: Goal, result: GoalResult) -> None:
        self._note(self.done, (goal, result))

    def goal_feedback(self, goal: Goal, feedback: Feedback) -> None:
        self._note(self.feedback, feedback)

    def wait(self, condition: Callable[[], bool], timeout: float = 5.0) -> None:
        """Wait until `condition()` holds, looking whenever something was recorded."""
        with self._news:
            assert self._news.wait_for(condition, timeout), 'it never happened'

    def of(self, kind: str, output: str | None = None) -> list[Command]:
        """Return the commands of a kind."""
        return [c for k, o, c in self.log if k == kind and output in (None, o)]

    @property
    def actions(self) -> list[np.ndarray]:
        """The values of all published actions."""
        return [c.values for c in self.of('publish')]

    def kinds(self) -> list[str]:
        """What was sent, in order: publish, stop, shadow."""
        return [kind for kind, _, _ in self.log]

    def told(self, kind: EventKind) -> list[Event]:
        """Return the events of a kind."""
        return [e for e in self.events if e.kind is kind]


def stamp(ns: int) -> SimpleNamespace:
    return SimpleNamespace(sec=ns // S, nanosec=ns % S)


class World:
    """A runner, its clock, its robot."""

    def __init__(self, folder: Path, data: Mapping[str, Any], *changes: Mapping[str, Any],
                 threaded: bool = False, active: bool = True, allow_force: bool = False,
                 sink: Recorder | None = None, **options: Any) -> None:
        path = folder / 'policy.yaml'
        path.write_text(yaml.safe_dump(merged(data, *changes), sort_keys=False))
        self.ns = 1_000 * S
        self.steady = 0.0
        self.sink = sink or Recorder()
        self.pose = [0.0, 0.1, 0.2]
        self.runner: Runner = build(
            path, self.sink, modules=(MODULE,),
            clock=Clock(lambda: self.ns, lambda: self.steady),
            options=Options(threaded=threaded, **options), allow_force=allow_force)
        self.period = self.runner.file.policy.period_s
        self._open = True
        if active:
            self.runner.activate()

    def close(self) -> None:
        if self._open:
            self._open = False
            self.runner.shutdown('test')
            assert self.runner.close()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += round(seconds * S)
        self.steady += seconds

    def say(self, pose: Sequence[float] | None = None, *, ns: int | None = None,
            **more: Any) -> None:
        """Publish the robot's joints."""
        self.pose = list(self.pose if pose is None else pose)
        self.runner.feed('joint_states', SimpleNamespace(
            header=SimpleNamespace(stamp=stamp(self.ns if ns is None else ns)), name=JOINTS,
            position=self.pose, velocity=[], effort=[]), **more)

    def step(self, pose: Sequence[float] | None = None) -> None:
        """One period: time, a measurement, the timer (which lock step does not have)."""
        self.advance(self.period)
        self.say(pose)
        if not self.runner.file.run.lock_step:
            self.runner.timer()

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def go(self, **request: Any) -> Goal:
        """Begin a goal."""
        return self.runner.execute(GoalRequest(**request))

    @property
    def phase(self) -> Phase:
        return self.runner.phase

    def numbers(self) -> list[int]:
        """Column 0 of what was published, of `numbered`: 1000 k + i."""
        return [round(float(a[0])) for a in self.sink.actions]


def enable(w: World, value: bool = True) -> None:
    """Say so on the enable topic."""
    w.runner.feed('enable', SimpleNamespace(data=value))


def result(goal: Goal) -> tuple[Code, str]:
    """Return how a goal has ended."""
    assert goal.result is not None
    return goal.result.code, goal.result.message
