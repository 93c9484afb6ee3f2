"""Time over ROS: /clock jumps reach the policy, the status speaks while time stands still."""
from __future__ import annotations

from collections.abc import Callable
import time
from typing import Any

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState

from flashrt_ros.msg import CapsuleEvent, PolicyStatus
from test.node.harness import LATCHED, Probe, Served, matched, until
from test.node.robot import Robot

Serve = Callable[..., Served]


def set_time(node: Served, clock: Any, second: int) -> None:
    """Publish a time until the node has it: its subscription to /clock is best effort."""
    message = Clock(clock=Time(sec=second))

    def moved() -> bool:
        clock.publish(message)
        return bool(node.node.get_clock().now().nanoseconds == second * 10**9)
    until(moved, f'time is not {second} s')


def test_p27_a_backward_jump_of_clock_stops_and_returns_to_origin(
        probe: Probe, serve: Serve) -> None:
    node = serve('numbered', use_sim_time=True)
    ns = node.namespace
    clock = probe.publisher(Clock, '/clock')
    events = probe.listen(CapsuleEvent, f'{node.name}/capsule_events')
    status = probe.listen(PolicyStatus, f'{node.name}/status', LATCHED)
    joints = probe.publisher(JointState, f'{ns}/joint_states')
    matched(clock, joints, node.node._sink._events)

    set_time(node, clock, 100)
    for i in range(3):
        joints.publish(JointState(name=['j0', 'j1', 'j2'], position=[0.1 * i] * 3))
        until(lambda n=i + 1: node.node.runner.status().step == n, f'step {i + 1} is not done')
    epoch = node.node.runner.epoch
    set_time(node, clock, 50)
    event = events.wait(lambda m: m.kind == CapsuleEvent.CLOCK_JUMP)
    assert event.epoch == epoch + 1
    after = status.wait(lambda m: m.epoch > epoch)
    assert (after.tick, after.step) == (0, 0)


def test_p27_a_message_right_behind_a_jump_belongs_to_the_new_time(
        probe: Probe, serve: Serve) -> None:
    """A simulator that starts anew sends its time and its first observation, and waits."""
    node = serve('numbered', use_sim_time=True)
    clock = probe.publisher(Clock, '/clock')
    joints = probe.publisher(JointState, f'{node.namespace}/joint_states')
    matched(clock, joints)
    status = node.node.runner.status

    def observe() -> None:
        joints.publish(JointState(name=['j0', 'j1', 'j2'], position=[0.1] * 3))
    for _ in range(10):
        set_time(node, clock, 100)
        step = status().step
        observe()
        until(lambda n=step + 1: status().step == n, 'a step is not done')
        epoch = status().epoch
        clock.publish(Clock(clock=Time(sec=10)))
        observe()
        until(lambda e=epoch: (status().epoch, status().step) == (e + 1, 1),
              'the first observation of the new time is lost')
        assert status().rejected_inputs == 0


def test_the_step_timer_of_a_live_policy_follows_simulated_time(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', use_sim_time=True)
    robot = Robot(probe, node.name)
    clock = probe.publisher(Clock, '/clock')
    matched(clock)
    set_time(node, clock, 10)
    robot.say()
    execution = probe.inside(lambda: robot.client.execute())
    robot.wait_phase('RUNNING')
    assert not robot.actions.messages  # time stands still
    for i in range(1, 6):
        robot.say()
        clock.publish(Clock(clock=Time(sec=10, nanosec=i * 10_000_000)))
        assert len(robot.actions.count(i)) == len(robot.actions.messages)
    assert not execution.result.done()


def test_the_nodes_time_follows_use_sim_time_on_and_off(probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    clock = probe.publisher(Clock, '/clock')

    def simulate(on: bool) -> None:
        node.inside(lambda: node.node.set_parameters([Parameter('use_sim_time', value=on)]))
    ours = node.node._time.now_ns
    assert abs(ours() - time.time_ns()) < 10**9
    simulate(True)
    matched(clock)
    set_time(node, clock, 100)
    assert ours() == 100 * 10**9
    [seen] = node.node._intake._executor.get_nodes()
    assert [s.topic_name for s in seen.subscriptions] == [
        '/clock', f'{node.namespace}/joint_states']      # a message does not overtake a jump
    simulate(False)
    assert len(seen.subscriptions) == 1
    assert abs(ours() - time.time_ns()) < 10**9


def test_status_and_diagnostics_speak_at_their_rate_while_time_stands_still(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', use_sim_time=True, status_hz=20)
    status = probe.listen(PolicyStatus, f'{node.name}/status', LATCHED)
    diagnostics = probe.listen(DiagnosticArray, '/diagnostics')
    assert status.count(4)[-1].phase == PolicyStatus.HOLD
    ours = diagnostics.wait(lambda m: any(s.name == f'{node.name}: policy' for s in m.status))
    policy = next(s for s in ours.status if s.name.endswith('policy'))
    assert policy.message == 'HOLD'
    assert {'tick', 'epoch', 'restore_bound_s'} <= {v.key for v in policy.values}
