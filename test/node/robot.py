"""A robot of three joints for node tests: it says where it stands, and hears what it is told."""
from __future__ import annotations

from collections.abc import Sequence
import threading
from typing import Any

from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory

from flashrt_ros.clients.client import PolicyClient
from flashrt_ros.msg import CapsuleEvent, PolicyStatus
from test.node.harness import LATCHED, Inbox, Probe, matched

JOINTS = ('j0', 'j1', 'j2')


class Robot:
    """Publishes joint_states on demand or at a rate, receives the outputs of `arm`."""

    def __init__(self, probe: Probe, node: str, output: Any = JointTrajectory,
                 topic: str = 'arm/joint_trajectory') -> None:
        ns = node.rpartition('/')[0]
        self.probe = probe
        self.client: PolicyClient = probe.client(node)
        self.status: Inbox = probe.listen(PolicyStatus, f'{node}/status', LATCHED)
        self.events: Inbox = probe.listen(CapsuleEvent, f'{node}/capsule_events')
        self.actions: Inbox = probe.listen(output, f'{ns}/{topic}')
        self.joints = probe.publisher(JointState, f'{ns}/joint_states')
        matched(self.joints)
        self.position = [0.0, 0.0, 0.0]
        self.velocity = [0.0, 0.0, 0.0]
        self._lock = threading.Lock()
        self._timer: Any = None

    def say(self, position: Sequence[float] | None = None) -> None:
        """Publish where the joints are."""
        with self._lock:
            self.position = list(position if position is not None else self.position)
            message = JointState(name=list(JOINTS), position=self.position,
                                 velocity=self.velocity)
        message.header.stamp = self.probe.node.get_clock().now().to_msg()
        self.joints.publish(message)

    def live(self, period_s: float = 0.01) -> None:
        """Publish at a rate from now on."""
        self._timer = self.probe.inside(lambda: self.probe.node.create_timer(period_s, self.say))

    def silent(self) -> None:
        """Publish no longer."""
        self.probe.inside(lambda: self.probe.node.destroy_timer(self._timer))

    def wait_phase(self, name: str, start: int = 0) -> PolicyStatus:
        """Wait for a status in a phase."""
        number = getattr(PolicyStatus, name)
        return self.status.wait(lambda m: m.phase == number, start=start)

    def start(self) -> Any:
        """Send a goal and wait until it moves the robot; return its Execution."""
        n = len(self.actions.messages)
        execution = self.probe.inside(lambda: self.client.execute())
        self.actions.wait(start=n)
        return execution

    def drive(self) -> Any:
        """Say where the joints are from now on, and start."""
        self.say()
        self.live()
        return self.start()

    def result(self, execution: Any) -> Any:
        """Wait for a goal's end."""
        return self.probe.result(execution.result)

    def call(self, verb: str, **fields: Any) -> Any:
        """Call a service by name."""
        return self.probe.call(lambda: self.client.call(verb, **fields))
