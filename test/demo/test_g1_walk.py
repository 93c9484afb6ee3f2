"""A walking robot: policy and physics go back together, and the walk repeats to the bit.

The Unitree G1's LSTM policy in closed loop with MuJoCo, in lock step: 250 ticks, save, 150 ticks,
restore, 33 ticks disturbed, restore, 150 ticks. 33 is no multiple of the phase's 40 ticks, so a
phase that does not return cannot hide.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
import pytest

pytest.importorskip('mujoco', reason="the walker needs mujoco: pip install 'flashrt_ros[demo]'")

from flashrt_ros.core.session import Options
from flashrt_ros.demo import g1
from flashrt_ros.ingest.output import Command
from flashrt_ros.runtime.build import build
from flashrt_ros.runtime.sink import NullSink
from test import shared_data

Rows = NDArray[np.float32]
PUSH = np.array([-60.0, 150.0, 0.0])
STATE = ('h_in', 'c_in', 'hidden_state', 'cell_state')      # names in ONNX and in TorchScript


class Collector(NullSink):
    """Keeps the newest action."""

    def __init__(self) -> None:
        self.action: Rows | None = None

    def publish(self, output: str, command: Command) -> None:
        """Keep it."""
        self.action = command.values.astype(np.float32)


class Walk:
    """Walker and runner in this process, one tick at a time."""

    def __init__(self, kind: dict[str, Any], folder: Path) -> None:
        root = shared_data.data('g1_lstm_walk')
        self.walker = g1.Walker(root)
        path = folder / 'walk.yaml'
        path.write_text(g1.policy_text(self.walker.joints, self.walker.rest, kind))
        self.sink = Collector()
        self.runner = build(path, self.sink, model_root=root, options=Options(threaded=False))
        self.runner.activate()

    def tick(self, push: NDArray[np.float64] | None = None) -> Rows:
        """Let 20 ms pass; return the policy's action (12,)."""
        self.walker.push[:] = 0.0 if push is None else push
        self.sink.action = None
        for topic, message in g1.plain(self.walker.step(), self.walker.joints).items():
            self.runner.feed(topic, message)
        assert self.sink.action is not None, self.runner.status().last_refusal
        self.walker.action = self.sink.action
        return self.sink.action

    def run(self, ticks: int) -> Rows:
        """Return the actions (ticks, 12) of an undisturbed walk."""
        return np.array([self.tick() for _ in range(ticks)])

    def disturb(self) -> None:
        """33 ticks, a strong push in the first 20."""
        for i in range(33):
            self.tick(PUSH if i < 20 else None)

    def back(self, snapshot: dict[str, Any]) -> None:
        """Return robot and policy to the save."""
        self.walker.restore(snapshot)
        self.runner.restore('walk').result(5)

    def leave_out(self, snapshot: dict[str, Any], *names: str) -> None:
        """Return to the save as a restore would that forgets some buffers."""
        session = self.runner.session
        arena = session._live.arena
        left = {n: arena.read(n) for n in names if n in session.layout}
        assert left, names
        self.back(snapshot)
        for name, data in left.items():
            assert not np.array_equal(arena.read(name), data), f'{name} did not move'
            arena.write(name, data)


@pytest.fixture(params=['onnx', 'torch'])
def walk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == 'torch':
        pytest.importorskip('torch', reason="pip install 'flashrt_ros[torch]'")
        made = Walk(g1.TORCH, tmp_path)
    else:
        pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")
        made = Walk(g1.ONNX, tmp_path)
    yield made
    made.runner.close()


def test_p2_a_walk_repeats_to_the_bit_after_a_fall_of_attention(walk: Walk) -> None:
    walk.run(250)
    walk.runner.save('walk')
    snapshot = walk.walker.snapshot()
    first = walk.run(150)
    end = walk.walker.data.qpos.copy()
    walk.back(snapshot)
    walk.disturb()
    assert np.abs(walk.walker.data.qpos[:2] - snapshot['physics'][1:3]).max() > 0.1
    walk.back(snapshot)
    again = walk.run(150)
    assert first.tobytes() == again.tobytes()
    assert np.array_equal(end, walk.walker.data.qpos)
    assert walk.walker.height > 0.7


def test_p3_p6_each_part_of_the_state_shows_in_the_first_action(walk: Walk) -> None:
    walk.run(60)
    walk.runner.save('walk')
    snapshot = walk.walker.snapshot()
    first = walk.tick()
    for names, least in ((STATE, 0.5), (('obs.last_action.actions',), 0.1),
                         (('obs.steps',), 0.05)):
        walk.back(snapshot)
        walk.disturb()
        walk.leave_out(snapshot, *names)
        assert np.abs(walk.tick() - first).max() > least, names
    walk.back(snapshot)
    walk.disturb()
    walk.back(snapshot)
    assert walk.tick().tobytes() == first.tobytes()


def test_the_walk_is_that_of_the_published_reference(walk: Walk) -> None:
    expected = np.load(shared_data.data('g1_lstm_walk', 'expected_rollback.npz'))
    walk.run(250)
    assert np.abs(walk.run(25) - expected['actions_reference'][:25]).max() < 1e-3


def test_a_walk_through_the_node_repeats_to_the_bit(tmp_path: Path) -> None:
    """The same over ROS topics and services, with the node in a process of its own."""
    pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")
    harness = pytest.importorskip('test.node.harness', reason='needs rclpy and the interfaces')
    from geometry_msgs.msg import Twist
    from sensor_msgs.msg import Imu, JointState
    from std_msgs.msg import Float32MultiArray

    root = shared_data.data('g1_lstm_walk')
    walker = g1.Walker(root)
    path = tmp_path / 'walk.yaml'
    path.write_text(g1.policy_text(walker.joints, walker.rest, g1.ONNX))
    kinds = {g1.JOINT_STATES: JointState, g1.IMU: Imu, g1.COMMAND: Twist}
    probe = harness.Probe()
    try:
        with harness.process(probe, path, '--model-root', str(root)) as (name, _):
            ns = name.rpartition('/')[0]
            client = probe.client(name)
            actions = probe.listen(Float32MultiArray, f'{ns}/{g1.ACTION}')
            out = {t: probe.publisher(kind, t) for t, kind in kinds.items()}
            harness.matched(*out.values())
            harness.until(lambda: probe.node.count_publishers(f'{ns}/{g1.ACTION}') == 1,
                          'the node does not publish')
            lost = [0]                         # ticks that were taken back

            def tick() -> Rows:
                for topic, message in g1.messages(walker.step(), walker.joints).items():
                    out[topic].publish(message)
                walker.action = np.array(actions.count(walker.ticks + lost[0])[-1].data,
                                         np.float32)
                return walker.action

            def back() -> None:
                lost[0] += walker.ticks - snapshot['ticks']
                walker.restore(snapshot)
                answer = probe.call(lambda: client.restore('walk'))
                assert answer.success, answer.message

            for _ in range(250):
                tick()
            assert probe.call(lambda: client.save('walk')).success
            snapshot = walker.snapshot()
            first = np.array([tick() for _ in range(150)])
            back()
            for i in range(33):
                walker.push[:] = PUSH if i < 20 else 0.0
                tick()
            walker.push[:] = 0.0
            back()
            again = np.array([tick() for _ in range(150)])
            assert first.tobytes() == again.tobytes()
    finally:
        probe.close()
