"""The scenario's eyes and hands: processes, topics and services, with waits on what is heard."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
import json
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.serialization import deserialize_message
from rclpy.task import Future
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from flashrt_ros.clients.blocking import BlockingClient
from flashrt_ros.core.errors import Code
from flashrt_ros.demo.arm import JOINTS
from flashrt_ros.demo.rollout import POLICY_FILE
from flashrt_ros.demo.shadow import Shadow
from flashrt_ros.msg import ActionChunk, PolicyStatus

SPACE = '/demo'
TIMEOUT_S = 20.0
DEEP = QoSProfile(depth=1000)
PHASES = ('UNCONFIGURED', 'HOLD', 'RUNNING', 'PAUSED', 'SHADOW', 'FAULT')


class TooBusyError(RuntimeError):
    """The machine did not keep up with real time: sensor messages became too old."""


@contextmanager
def processes(folder: Path) -> Iterator[None]:
    """Run the policy node and the simulated cell, each in a process of its own."""
    command = [sys.executable, '-m']
    started = [
        subprocess.Popen([*command, 'flashrt_ros.tools.cli', 'serve', str(POLICY_FILE),
                          '--namespace', SPACE, '-p', 'status_hz:=0',
                          '-p', f'capsule_dir:={folder}']),
        subprocess.Popen([*command, 'flashrt_ros.demo.sim_node', '--ros-args', '-r',
                          f'__ns:={SPACE}'])]
    try:
        yield
    finally:
        for child in started:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        for child in started:
            try:
                child.wait(6)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@dataclass
class Record:
    """Everything that the report shows. Times are seconds since the start of the story."""

    arm: list[tuple[float, list[float]]] = field(default_factory=list)       # commands, rad
    gripper: list[tuple[float, float]] = field(default_factory=list)         # commands, m
    measured: list[tuple[float, list[float]]] = field(default_factory=list)  # joints, rad
    phases: list[tuple[float, str]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    frames: list[tuple[float, NDArray[np.uint8]]] = field(default_factory=list)
    facts: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    no_pictures: str = ''


class Watch:
    """Hears everything and does what a person, a tree and a controller's client would do."""

    def __init__(self) -> None:
        self.record = Record()
        self.shadow = Shadow()
        self.driving = False           # the scenario itself sends arm commands
        self._news = threading.Condition()
        self._start = time.monotonic()
        self._status: Any = None
        self._goal: Any = None
        self._id = 0
        self.client = BlockingClient(f'{SPACE}/policy_node', timeout_s=TIMEOUT_S)
        self.client.inside(self._wire)

    def _wire(self) -> None:
        node = self.client.node
        self._to_cell = node.create_publisher(String, f'{SPACE}/cell_command', 10)
        self._to_arm = node.create_publisher(
            JointTrajectory, f'{SPACE}/arm_controller/joint_trajectory', 10)
        self._to_gripper = node.create_publisher(
            Float64MultiArray, f'{SPACE}/gripper_controller/commands', 10)

        def listen(kind: Any, topic: str, hear: Callable[[Any], None], qos: Any = DEEP,
                   raw: bool = False) -> None:
            node.create_subscription(kind, f'{SPACE}/{topic}', hear, qos, raw=raw)
        sensors = QoSProfile(depth=100, reliability=qos_profile_sensor_data.reliability)
        for topic, kind in (('joint_states', JointState), ('part_in_hand', Float64MultiArray),
                            ('cue', Float64MultiArray)):
            listen(kind, topic, self._sensor(topic, kind), sensors, raw=True)
        listen(ActionChunk, 'policy_node/chunk', self.shadow.hear_chunk)
        listen(String, 'cell_state', self._on_cell)
        listen(Image, 'camera/image_raw', self._on_image, qos_profile_sensor_data)
        listen(JointTrajectory, 'arm_controller/joint_trajectory', self._on_arm)
        listen(Float64MultiArray, 'gripper_controller/commands', self._on_gripper)
        self.client.client.on_status(self._on_status)

    def close(self) -> None:
        """Leave the graph."""
        self.client.close()

    # -- ears

    def begin(self) -> None:
        """The story begins now."""
        with self._news:
            self._start = time.monotonic()
            old = self.record
            self.record = Record(phases=[(0.0, p) for _, p in old.phases[-1:]],
                                 facts=[(0.0, f) for _, f in old.facts[-1:]],
                                 frames=[(0.0, f) for _, f in old.frames[-1:]],
                                 no_pictures=old.no_pictures)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._start

    def _sensor(self, topic: str, kind: Any) -> Callable[[bytes], None]:
        def hear(raw: bytes) -> None:
            message = deserialize_message(raw, kind)
            self.shadow.hear(topic, raw, message)
            if kind is JointState:
                with self._news:
                    self.record.measured.append((self.now, list(message.position)))
        return hear

    def _on_status(self, message: PolicyStatus) -> None:
        with self._news:
            self._status = message
            phase = PHASES[message.phase]
            if not self.record.phases or self.record.phases[-1][1] != phase:
                self.record.phases.append((self.now, phase))
            self._news.notify_all()

    def _on_cell(self, message: String) -> None:
        with self._news:
            facts = json.loads(message.data)
            self.record.facts.append((self.now, facts))
            self.record.no_pictures = facts['no_pictures']
            self._news.notify_all()

    def _on_image(self, message: Image) -> None:
        pixels = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width, 3)
        with self._news:
            self.record.frames.append((self.now, pixels))

    def _on_arm(self, message: JointTrajectory) -> None:
        with self._news:
            if not self.driving:
                self.record.arm.append((self.now, list(message.points[0].positions)))
            self._news.notify_all()

    def _on_gripper(self, message: Float64MultiArray) -> None:
        with self._news:
            if not self.driving:
                self.record.gripper.append((self.now, message.data[0]))

    # -- waiting

    def until(self, what: str, condition: Callable[[dict[str, Any], Any], bool]
              ) -> dict[str, Any]:
        """Wait until `condition(cell facts, status)` holds; return the facts."""
        def holds() -> bool:
            facts = self.record.facts
            return bool(facts and self._status is not None
                        and condition(facts[-1][1], self._status))
        with self._news:
            if not self._news.wait_for(lambda: holds() or self._ended(), TIMEOUT_S):
                last = self.record.facts[-1][1] if self.record.facts else None
                raise RuntimeError(f'{what}: not within {TIMEOUT_S:.0f} s; the cell said {last}, '
                                   f'the node {self._status}')
            if not holds():
                end = self._goal.result()
                kind = TooBusyError if end.code == Code.INPUT_STALE else RuntimeError
                raise kind(f'{what}: the goal ended before, {Code(end.code).name}: {end.message}')
            return dict(self.record.facts[-1][1])

    def _ended(self) -> bool:
        return self._goal is not None and self._goal.done()

    def execute(self) -> Future:
        """Send a goal; return the future of its result. While it is open, `until` watches it."""
        self._goal = self.client.execute(max_duration_s=60.0).result

        def ended(_: Future) -> None:
            with self._news:
                self._news.notify_all()
        self._goal.add_done_callback(ended)
        return self._goal

    def end(self) -> Any:
        """Stop the node; return the result of the goal that it had."""
        goal, self._goal = self._goal, None
        self.client.call(lambda c: c.trigger('stop'))
        return self.client.wait(goal)

    def look(self) -> None:
        """Wait for pictures of the present, if there are any at all."""
        with self._news:
            seen = len(self.record.frames)
        self.until('a picture', lambda facts, _: bool(
            facts['no_pictures'] or len(self.record.frames) >= seen + 2))

    def phase(self, name: str) -> None:
        """Wait until the node is in a phase."""
        self.until(f'phase {name}', lambda _, status: PHASES[status.phase] == name)

    def silent(self, reports: int) -> int:
        """Return how many actions the node sends within so many reports of the cell."""
        with self._news:
            sent, heard = len(self.record.arm), len(self.record.facts)
        self.until('reports of the cell', lambda *_: len(self.record.facts) >= heard + reports)
        with self._news:
            return len(self.record.arm) - sent

    def mark(self, what: str) -> None:
        """Note a moment of the story."""
        with self._news:
            self.record.marks.append((self.now, what))

    # -- hands

    def cell(self, do: str, **fields: Any) -> dict[str, Any]:
        """Let something happen in the cell; return its facts when it has happened."""
        self._id += 1
        text = json.dumps({'id': self._id, 'do': do, **fields})
        self.client.inside(lambda: self._to_cell.publish(String(data=text)))
        return self.until(do, lambda facts, _: facts['id'] == self._id)

    def drive(self, joints: list[float], finger: float, seconds: float) -> None:
        """Send the arm somewhere, as a controller's client does, and wait until it is there."""
        point = JointTrajectoryPoint(positions=joints)
        point.time_from_start.sec = int(seconds)
        point.time_from_start.nanosec = round(seconds % 1 * 1e9)
        self.driving = True
        self.client.inside(lambda: self._to_gripper.publish(Float64MultiArray(data=[finger])))
        self.client.inside(lambda: self._to_arm.publish(
            JointTrajectory(joint_names=list(JOINTS), points=[point])))
        self.until('driving back', lambda facts, _: max(
            abs(a - b) for a, b in zip(facts['joints'], joints, strict=True)) < 0.01)
        self.driving = False
