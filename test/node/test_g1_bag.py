"""The recorded walk of a Unitree G1, played over ROS topics into a running node, in lock step."""
from __future__ import annotations

from typing import Any

from geometry_msgs.msg import Twist
import numpy as np
import pytest
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Imu, JointState
from std_msgs.msg import Float32MultiArray

from flashrt_ros.msg import ActionChunk
from test.node.harness import POLICIES, Probe, matched, process
from test.shared_data import data

KINDS = {'/joint_states': JointState, '/imu/data': Imu, '/cmd_vel': Twist}


def recorded(bag: Any) -> tuple[list[dict[str, bytes]], np.ndarray]:
    """Return the serialised inputs of each step and the recorded actions (500, 12)."""
    from rosbags.highlevel import AnyReader
    steps: list[dict[str, bytes]] = [{}]
    actions = []
    with AnyReader([bag]) as reader:
        for connection, _, raw in reader.messages():
            if connection.topic == '/policy/action':
                actions.append(reader.deserialize(raw, connection.msgtype).data)
                steps.append({})
            else:
                steps[-1][connection.topic] = bytes(raw)
    return steps[:-1], np.array(actions)


def test_each_of_the_500_actions_equals_the_recorded_one(probe: Probe) -> None:
    pytest.importorskip('onnxruntime')
    pytest.importorskip('rosbags')
    steps, wanted = recorded(data('bags', 'g1_walk_mcap'))
    assert wanted.shape == (500, 12)
    model = data('g1_lstm_walk', 'g1_lstm.onnx')
    options = ('--model-root', str(model.parents[1]))
    with process(probe, POLICIES / 'g1.yaml', *options) as (node, _):
        ns = node.rpartition('/')[0]
        actions = probe.listen(Float32MultiArray, f'{ns}/policy/action')
        chunks = probe.listen(ActionChunk, f'{node}/chunk')
        publishers = {topic: probe.publisher(kind, topic) for topic, kind in KINDS.items()}
        matched(*publishers.values())
        got = []
        for i, step in enumerate(steps):
            for topic, raw in step.items():
                publishers[topic].publish(deserialize_message(raw, KINDS[topic]))
            got.append(actions.count(i + 1)[i].data)
        assert np.abs(np.array(got) - wanted).max() < 1e-5
        last = chunks.count(500)[-1]
        assert (last.tick, last.step) == (500, 499)
        assert sorted(last.input_names) == sorted(KINDS)
