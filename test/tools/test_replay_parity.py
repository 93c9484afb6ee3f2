"""A live node over DDS and an offline replay of what was recorded of it agree tick for tick.

The recorder is a node that keeps the serialised messages as they come, as a rosbag2 recorder does.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
import threading
import time
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rclpy', reason='needs ROS 2')
from geometry_msgs.msg import Twist
from sensor_msgs.msg import JointState
from std_msgs.msg import Float32MultiArray

from flashrt_ros.msg import ActionChunk, CapsuleEvent, PolicyStatus
from flashrt_ros.srv import RestoreCapsule, SaveCapsule
from flashrt_ros.tools.compare import Verdict
from flashrt_ros.tools.replaying import Ask, replay
from test.node.harness import LATCHED, RELIABLE, Probe, Served, matched, until
from test.tools.live_run import EARLY, JOINTS, LOCK_STEP, POLICY, merged, write_bag


class Tape:
    """Keeps the serialised messages of some topics, in the order in which they came."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._lock = threading.Condition()
        self.heard: list[tuple[str, str, int, bytes]] = []

    def listen(self, kind: Any, topic: str, qos: Any = RELIABLE) -> None:
        """Record a topic."""
        name = '/'.join((kind.__module__.split('.')[0], kind.__module__.split('.')[1],
                         kind.__name__))

        def heard(raw: bytes) -> None:
            with self._lock:
                self.heard.append((topic, name, time.time_ns(), raw))
                self._lock.notify_all()
        self._probe.inside(lambda: self._probe.node.create_subscription(
            kind, topic, heard, qos, raw=True))

    def wait(self, topic: str, n: int) -> None:
        """Wait until n messages of a topic were heard."""
        with self._lock:
            assert self._lock.wait_for(
                lambda: sum(m[0] == topic for m in self.heard) >= n, 20), f'{topic}: not {n}'

    def count(self, topic: str) -> int:
        """Return how many messages of a topic were heard."""
        with self._lock:
            return sum(m[0] == topic for m in self.heard)


class World:
    """A node, a robot that speaks, and a recorder."""

    def __init__(self, folder: Path, *changes: Any) -> None:
        path = folder / 'policy.yaml'
        path.write_text(yaml.safe_dump(merged(POLICY, *changes), sort_keys=False))
        self.policy_file = path
        self.folder = folder
        self.probe = Probe()
        self.served = Served(path, introspection='contents')
        self.served.activate()
        name, ns = self.served.name, self.served.namespace
        self.chunk, self.ns = f'{name}/chunk', ns
        self.tape = Tape(self.probe)
        self.tape.listen(ActionChunk, self.chunk)
        self.tape.listen(PolicyStatus, f'{name}/status', LATCHED)
        self.tape.listen(CapsuleEvent, f'{name}/capsule_events')
        self.tape.listen(Float32MultiArray, f'{ns}/action')
        self.tape.listen(JointState, f'{ns}/joint_states')
        self.tape.listen(Twist, f'{ns}/cmd_vel')
        for verb, kind in (('save_capsule', SaveCapsule), ('restore_capsule', RestoreCapsule)):
            self.tape.listen(kind.Event, f'{name}/{verb}/_service_event')
        self.client = self.probe.client(name)
        self.joints = self.probe.publisher(JointState, f'{ns}/joint_states')
        self.twist = self.probe.publisher(Twist, f'{ns}/cmd_vel')
        matched(self.joints, self.twist, n=2)
        until(lambda: self.probe.node.count_publishers(self.chunk) == 1, 'the node is silent')
        self.rng = np.random.default_rng(3)
        self._timer: Any = None

    def say(self) -> None:
        """The robot says where it stands."""
        message = JointState(name=list(JOINTS), position=self.rng.normal(size=3).tolist(),
                             velocity=[0.0, 0.0, 0.0])
        message.header.stamp = self.probe.node.get_clock().now().to_msg()
        self.joints.publish(message)

    def live(self) -> None:
        """It says so at 80 Hz from now on, whatever the policy does."""
        self._timer = self.probe.inside(lambda: self.probe.node.create_timer(0.0125, self.say))

    def more_chunks(self, n: int) -> None:
        """Wait for n more chunks."""
        self.tape.wait(self.chunk, self.tape.count(self.chunk) + n)

    def bag(self) -> Path:
        """Write what was heard."""
        return write_bag(self.folder / 'bag', self.tape.heard)

    def close(self) -> None:
        self.served.close()
        self.probe.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*changes: Any) -> World:
        made.append(World(tmp_path, *changes))
        return made[-1]
    yield make
    for w in made:
        w.close()


@pytest.mark.parametrize('changes', [(), (EARLY,)], ids=['plain', 'early'])
def test_p43_a_recorded_timer_driven_node_is_repeated_tick_for_tick(
        world: Callable[..., World], changes: tuple[Any, ...]) -> None:
    w = world(*changes)
    w.live()
    w.twist.publish(Twist())
    w.probe.inside(lambda: w.client.execute())
    w.more_chunks(6)
    forward = Twist()
    forward.linear.x = 0.4
    w.twist.publish(forward)
    assert w.probe.call(lambda: w.client.call('save_capsule', name='k')).success
    w.more_chunks(5)
    answer = w.probe.call(lambda: w.client.call('restore_capsule', name='k'))
    assert answer.success, answer.message
    w.probe.inside(lambda: w.client.execute())
    w.more_chunks(5)
    w.probe.call(lambda: w.client.call('stop'))
    w.probe.inside(lambda: w.client.execute())
    w.more_chunks(4)
    w.probe.call(lambda: w.client.call('stop'))
    report = replay(Ask(w.bag(), w.policy_file)).report
    assert report.verdict is Verdict.SAME, (report.summary(), report.missing)
    by = {c.what: c for c in report.outputs}
    assert by['chunks'].same_bytes
    assert by['chunks'].compared == by['chunks'].recorded >= 20
    assert [(a.verb, a.same) for a in report.answers] == [('save_capsule', True),
                                                          ('restore_capsule', True)]


def test_a_lock_step_node_and_its_replay_agree_tick_for_tick(world: Callable[..., World]) -> None:
    w = world(LOCK_STEP, {'run': {'autorun': True}})
    w.twist.publish(Twist())
    w.tape.wait(f'{w.ns}/cmd_vel', 1)

    def steps(n: int) -> None:
        for _ in range(n):
            before = w.tape.count(f'{w.ns}/action')
            w.probe.inside(w.say)
            w.tape.wait(f'{w.ns}/action', before + 1)
    steps(23)
    assert w.probe.call(lambda: w.client.call('save_capsule', name='k')).success
    steps(9)
    assert w.probe.call(lambda: w.client.call('restore_capsule', name='k')).success
    steps(20)
    report = replay(Ask(w.bag(), w.policy_file)).report
    assert report.verdict is Verdict.SAME, (report.summary(), report.missing)
    by = {c.what: c for c in report.outputs}
    assert (by['chunks'].same_bytes, by['actions'].same_bytes) == (True, True)
    assert by['actions'].compared == 52
