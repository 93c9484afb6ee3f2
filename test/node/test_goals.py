"""The action: one goal at a time, preemption, cancel, feedback, prompts, clients that vanish."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from action_msgs.msg import GoalStatus
from rclpy.qos import QoSProfile
from std_msgs.msg import Float64MultiArray
from unique_identifier_msgs.msg import UUID

from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import ActionChunk, PolicyStatus
from test.node.harness import Probe, Served, until
from test.node.robot import Robot

Serve = Callable[..., Served]


def moving(probe: Probe, serve: Serve, policy: str = 'arm', **kwargs: Any) -> tuple[Served, Robot]:
    node = serve(policy)
    robot = Robot(probe, node.name, **kwargs)
    robot.say()
    robot.live()
    return node, robot


def test_a_goal_ends_after_max_ticks_with_ok_and_its_numbers(probe: Probe, serve: Serve) -> None:
    _, robot = moving(probe, serve)
    execution = probe.inside(lambda: robot.client.execute(max_ticks=7))
    result = robot.result(execution)
    assert (result.code, result.ticks) == (Code.OK, 7)
    assert result.epoch > 1
    assert len(robot.actions.messages) >= 7


def test_p40_a_new_goal_preempts_and_no_action_of_the_old_follows(
        probe: Probe, serve: Serve) -> None:
    node, robot = moving(probe, serve)
    chunks = probe.listen(ActionChunk, f'{node.name}/chunk')
    first = robot.start()
    second = probe.inside(lambda: robot.client.execute(max_ticks=5))
    assert robot.result(first).code == Code.PREEMPTED
    result = robot.result(second)
    assert (result.code, result.ticks) == (Code.OK, 5)
    epochs = [c.epoch for c in chunks.messages]
    assert epochs == sorted(epochs)
    assert epochs.count(result.epoch) or epochs[-1] < result.epoch


def test_p40_many_goals_in_a_burst_leave_exactly_one(probe: Probe, serve: Serve) -> None:
    _, robot = moving(probe, serve)
    goals = [probe.inside(lambda: robot.client.execute()) for _ in range(10)]
    for goal in goals[:-1]:
        assert robot.result(goal).code == Code.PREEMPTED
    assert not goals[-1].result.done()
    probe.inside(goals[-1].cancel)
    assert robot.result(goals[-1]).code == Code.CANCELLED


def test_p40_a_client_that_vanishes_before_the_acknowledgement_blocks_nothing(
        probe: Probe, serve: Serve) -> None:
    node, robot = moving(probe, serve)
    for _ in range(3):
        gone = Probe('vanishing')
        client = gone.node.create_client(
            ExecutePolicy.Impl.SendGoalService, f'{node.name}/execute/_action/send_goal',
            qos_profile=QoSProfile(depth=10))
        until(client.service_is_ready, 'the action is not discovered')
        held = node.inside  # the request is on its way when its client is gone

        def send(c: Any = client) -> None:
            c.call_async(ExecutePolicy.Impl.SendGoalService.Request(
                goal_id=UUID(uuid=list(range(16)))))
        gone.inside(send)
        gone.close()
        assert held(lambda: True)
    execution = probe.inside(lambda: robot.client.execute(max_ticks=3))
    result = robot.result(execution)
    assert (result.code, result.ticks) == (Code.OK, 3)


def test_cancel_ends_with_the_status_canceled(probe: Probe, serve: Serve) -> None:
    _, robot = moving(probe, serve)
    execution = robot.start()
    handle = execution._handle
    got = probe.inside(handle.get_result_async)
    probe.inside(execution.cancel)
    response = probe.result(got)
    assert response.status == GoalStatus.STATUS_CANCELED
    assert response.result.code == Code.CANCELLED
    robot.wait_phase('HOLD', start=len(robot.status.messages) - 1)


def test_a_goal_with_a_stale_epoch_or_a_wrong_duration_starts_nothing(
        probe: Probe, serve: Serve) -> None:
    _, robot = moving(probe, serve)
    for fields, code in (({'if_epoch': 77}, Code.STALE_EPOCH),
                         ({'max_duration_s': -1.0}, Code.INVALID_ARGUMENT),
                         ({'prompt': 'fold'}, Code.INVALID_ARGUMENT),
                         ({'capsule': 'nobody'}, Code.NOT_FOUND)):
        execution = probe.inside(lambda f=fields: robot.client.execute(**f))
        assert robot.result(execution).code == code
    assert not robot.actions.messages


def test_feedback_follows_the_running_goal(probe: Probe, serve: Serve) -> None:
    node = serve('arm', status_hz=50)
    robot = Robot(probe, node.name)
    robot.say()
    robot.live()
    seen: list[Any] = []
    execution = probe.inside(lambda: robot.client.execute(feedback=seen.append))
    until(lambda: any(f.tick > 3 for f in seen), 'no feedback with ticks')
    assert {f.phase for f in seen} <= {PolicyStatus.RUNNING, PolicyStatus.HOLD}
    assert all(0 <= f.input_age_s < 5 for f in seen)
    probe.inside(execution.cancel)
    assert robot.result(execution).code == Code.CANCELLED


def test_a_goal_in_lock_step_ends_by_its_limit_and_gives_feedback_though_no_message_comes(
        probe: Probe, serve: Serve) -> None:
    node = serve('held_lockstep', status_hz=0)
    robot = Robot(probe, node.name)
    seen: list[Any] = []
    execution = probe.inside(
        lambda: robot.client.execute(max_duration_s=0.35, feedback=seen.append))
    result = robot.result(execution)
    assert result.code == Code.OK, result.message
    assert seen
    assert not node.inside(lambda: node.node._poll._on)      # an idle node is not woken


def test_a_goal_may_begin_with_a_restore(probe: Probe, serve: Serve) -> None:
    _, robot = moving(probe, serve)
    first = probe.inside(lambda: robot.client.execute(max_ticks=4))
    assert robot.result(first).code == Code.OK
    assert robot.call('save_capsule', name='four').capsule.tick == 4
    again = probe.inside(lambda: robot.client.execute(max_ticks=2, capsule='origin'))
    assert robot.result(again).code == Code.OK
    assert robot.call('save_capsule', name='two').capsule.tick == 2


def test_p44_after_a_prompt_change_no_action_of_the_old_prompt_is_published(
        probe: Probe, serve: Serve) -> None:
    _, robot = moving(probe, serve, 'prompted', output=Float64MultiArray, topic='action')
    prompts = ['a', 'b', 'c', 'd', 'e', 'f']
    for letter in prompts:
        probe.inside(lambda p=letter: robot.client.execute(prompt=p))
        robot.actions.wait(lambda m, p=letter: int(m.data[0]) // 10000 == ord(p))
    order = [chr(int(m.data[0]) // 10000) for m in robot.actions.messages]
    assert order == sorted(order)
    assert sorted(set(order)) == prompts
