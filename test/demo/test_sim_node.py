"""The cell as a ROS node: its controller obeys whoever commands, by joint names."""
from __future__ import annotations

from collections.abc import Iterator
import json
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")
pytest.importorskip('rclpy', reason='needs rclpy')

from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from std_msgs.msg import Bool, Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from flashrt_ros.demo import arm, sim_node
from test.node import harness


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the node in a thread; yields its namespace."""
    monkeypatch.setattr(sim_node, 'NO_PICTURES', 'not in this test')
    context, space = Context(), harness.namespace()
    context.init(args=[], domain_id=harness.DOMAIN)
    node = sim_node.SimNode(context=context, namespace=space, use_global_arguments=False)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)

    ended = threading.Event()

    def spin() -> None:                # to the end of a turn: a timer may be publishing
        while not ended.is_set():
            executor.spin_once(timeout_sec=0.1)
    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    yield space
    ended.set()
    thread.join(5)
    context.try_shutdown()
    node.close()
    executor.shutdown(timeout_sec=0)
    node.destroy_node()


def test_the_cell_obeys_by_joint_name_and_tells_what_happened(cell: str) -> None:
    probe = harness.Probe()
    try:
        facts = probe.listen(String, f'{cell}/cell_state')
        enable = probe.listen(Bool, f'{cell}/enable')
        cue = probe.listen(Float64MultiArray, f'{cell}/cue', harness.BEST_EFFORT)
        order = probe.publisher(String, f'{cell}/cell_command')
        trajectory = probe.publisher(JointTrajectory, f'{cell}/arm_controller/joint_trajectory')
        harness.matched(order, trajectory)
        number = [0]

        def do(what: str, **fields: Any) -> dict[str, Any]:
            number[0] += 1
            order.publish(String(data=json.dumps({'id': number[0], 'do': what, **fields})))
            found = facts.wait(lambda m: json.loads(m.data)['id'] == number[0])
            return dict(json.loads(found.data))

        state = do('reset', part=[0.33, -0.1], yaw=0.2, target=2)
        assert state['lit']
        assert np.allclose(state['part'][:2], [0.33, -0.1], atol=1e-3)
        cue.wait(lambda m: list(m.data) == [0.0, 0.0, 1.0])
        do('enable', on=False)
        enable.wait(lambda m: not m.data)

        wanted = arm.inverse((0.1, 0.3, 0.2))
        point = JointTrajectoryPoint(positions=wanted[::-1].tolist())
        point.time_from_start.nanosec = 200_000_000
        trajectory.publish(JointTrajectory(joint_names=[*arm.JOINTS][::-1], points=[point]))
        trajectory.publish(JointTrajectory(joint_names=[*arm.JOINTS]))         # no stop
        trajectory.publish(JointTrajectory(joint_names=['elbow'], points=[point]))
        facts.wait(lambda m: np.abs(json.loads(m.data)['joints'] - wanted).max() < 0.02)
        cue.wait(lambda m: list(m.data) == [0.0, 0.0, 0.0])                    # it moved
    finally:
        probe.close()
