"""P37 over ROS: every way out of RUNNING sends on_stop, then silence; no other phase sends it.

On the far side stands a trajectory controller that finishes whatever it has accepted.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trajectory_msgs.msg import JointTrajectory

from flashrt_ros.core.errors import Code
from test.node.harness import Probe, Served
from test.node.robot import JOINTS, Robot
from test.runtime.fake_controller import FakeController

STAND = [0.4, -0.3, 0.2]  # measured when the stop comes; the policy would be near 0


def is_hold(message: JointTrajectory) -> bool:
    """Whether it holds the measured joints."""
    return len(message.points) == 1 and list(message.points[0].positions) == STAND


def cancel(robot: Robot, node: Served, goal: Any) -> None:
    robot.probe.inside(goal.cancel)


def preempt(robot: Robot, node: Served, goal: Any) -> None:
    robot.probe.inside(lambda: robot.client.execute(shadow=True))


def deactivate(robot: Robot, node: Served, goal: Any) -> None:
    node.inside(node.node.trigger_deactivate)


def nan_input(robot: Robot, node: Served, goal: Any) -> None:
    robot.silent()
    robot.velocity = [float('nan'), 0.0, 0.0]
    robot.say()


def raise_in_policy(robot: Robot, node: Served, goal: Any) -> None:
    robot.silent()
    robot.say([-200.0, *STAND[1:]])


def verb(name: str, **fields: Any) -> Callable[[Robot, Served, Any], None]:
    def way(robot: Robot, node: Served, goal: Any) -> None:
        answer = robot.call(name, **fields)
        assert answer.success, answer.message
    way.__name__ = name
    return way


def force_restore(robot: Robot, node: Served, goal: Any) -> None:
    assert robot.call('restore_capsule', name='here').success


WAYS = [
    (cancel, Code.CANCELLED), (preempt, Code.PREEMPTED), (force_restore, Code.RESTORED),
    (verb('rollback'), Code.RESTORED), (verb('reset'), Code.RESTORED),
    (verb('stop'), Code.STOPPED), (verb('pause'), None), (deactivate, Code.STOPPED),
]


@pytest.mark.parametrize(('way', 'code'), WAYS, ids=[w.__name__ for w, _ in WAYS])
def test_p37_a_way_out_sends_the_measured_pose_and_then_nothing(
        probe: Probe, serve: Callable[..., Served], way: Any, code: Code | None) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.position = list(STAND)
    robot.say()
    robot.live()
    goal = robot.start()
    assert robot.call('save_capsule', name='here').success
    before = len(robot.actions.messages)
    way(robot, node, goal)
    hold = robot.actions.wait(is_hold, start=before)
    if code is not None:
        assert robot.result(goal).code == code
    # The order of one publisher is kept: whatever was sent after the hold would be here by the
    # time that an answer to a later save has come.
    assert robot.call('save_capsule').success
    messages = robot.actions.messages
    assert [is_hold(m) for m in messages[messages.index(hold):]] == [True]


@pytest.mark.parametrize(('way', 'code'), [
    (nan_input, Code.INPUT_STALE), (raise_in_policy, Code.FAULT)])
def test_p37_a_failure_sends_the_last_measured_pose(
        probe: Probe, serve: Callable[..., Served], way: Any, code: Code) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.position = list(STAND)
    robot.say()
    robot.live()
    goal = robot.start()
    before = len(robot.actions.messages)
    way(robot, node, goal)
    last = robot.actions.wait(lambda m: list(m.points[0].positions)[1:] == STAND[1:], start=before)
    assert robot.result(goal).code == code
    assert robot.actions.messages[-1] is last


@pytest.mark.parametrize('verb_name', [
    'restore_capsule', 'rollback', 'reset', 'stop', 'save_capsule'])
def test_p37_no_verb_publishes_anything_in_hold(
        probe: Probe, serve: Callable[..., Served], verb_name: str) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say(STAND)
    robot.live()
    moved = probe.inside(lambda: robot.client.execute(max_ticks=2))
    assert robot.result(moved).code == Code.OK
    assert robot.call('save_capsule', name='a').success
    before = len(robot.actions.messages)
    answer = robot.call(verb_name)
    assert answer.success, answer.message
    assert len(robot.actions.messages) == before


def test_p37_a_shadow_goal_commands_nothing_and_its_end_neither(
        probe: Probe, serve: Callable[..., Served]) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say(STAND)
    robot.live()
    execution = probe.inside(lambda: robot.client.execute(shadow=True, max_ticks=5))
    assert robot.result(execution).code == Code.OK
    assert not robot.actions.messages


def test_p37_the_controller_stands_at_the_measured_pose_within_time_s_and_two_periods(
        probe: Probe, serve: Callable[..., Served]) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.position = list(STAND)
    robot.drive()
    assert robot.call('stop').success
    robot.actions.wait(is_hold)
    controller = FakeController(JOINTS, STAND)
    for message in robot.actions.messages:
        points = [list(p.positions) for p in message.points]
        times = [p.time_from_start.sec + 1e-9 * p.time_from_start.nanosec for p in message.points]
        controller.message(message.joint_names, points, times)
        controller.advance(0.01)
    controller.advance(0.05 + 2 * 0.01)
    assert list(controller.setpoint) == pytest.approx(STAND)
    controller.advance(5.0)
    assert list(controller.setpoint) == pytest.approx(STAND)


def test_p12_after_a_restore_nothing_moves_until_a_new_goal(
        probe: Probe, serve: Callable[..., Served]) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.position = list(STAND)
    robot.drive()
    assert robot.call('save_capsule', name='a').success
    assert robot.call('restore_capsule', name='a').success
    hold = robot.actions.wait(is_hold)
    assert not robot.call('resume').success
    assert robot.actions.messages[-1] is hold
    n = len(robot.actions.messages)
    robot.start()
    assert not is_hold(robot.actions.wait(start=n))
