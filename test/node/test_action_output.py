"""Outputs that are actions: each command a goal, on_stop too; what goes wrong is counted and told.

control_msgs is not there as a wheel, so the far side is a double of rclpy's client, or a server of
another action.
"""
from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

from action_msgs.msg import GoalStatus
import numpy as np
import pytest
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.task import Future

from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.output import Command
from flashrt_ros.node import conversions
from flashrt_ros.node.action_output import ActionOutput, GoalClient, GoalCounts
from test.node.harness import POLICIES, Probe, Served, namespace, until

FOLLOW = 'control_msgs/action/FollowJointTrajectory'
GRIPPER = 'control_msgs/action/GripperCommand'


def command(kind: str = FOLLOW, *points: float) -> Command:
    values = np.array(points or (0.5,))
    return Command('arm', kind, 'position', ('j0',), values[:1], 0.1, values[:, None],
                   tuple(0.1 * (i + 1) for i in range(len(values))), 0)


class Handle:
    """A goal as the client's double sees it."""

    def __init__(self, accepted: bool) -> None:
        self.accepted = accepted
        self.cancelled = False
        self.result = Future()

    def get_result_async(self) -> Future:
        return self.result

    def cancel_goal_async(self) -> None:
        self.cancelled = True

    def end(self, status: int, **fields: Any) -> None:
        self.result.set_result(SimpleNamespace(status=status, result=SimpleNamespace(**fields)))


class Client:
    """The client's double: remembers goals; `answer` answers the oldest one left."""

    def __init__(self) -> None:
        self.ready = True
        self.goals: list[Any] = []
        self._futures: list[Future] = []

    def server_is_ready(self) -> bool:
        return self.ready

    def send_goal_async(self, goal: Any) -> Future:
        self.goals.append(goal)
        self._futures.append(Future())
        return self._futures[-1]

    def answer(self, accepted: bool = True) -> Handle:
        handle = Handle(accepted)
        self._futures.pop(0).set_result(handle)
        return handle


class Said:
    """What the output told and logged."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, counts: GoalCounts, text: str) -> None:
        self.texts.append(text)

    def error(self, text: str, **_: Any) -> None:
        pytest.fail(text)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def output(client: Client, said: Said) -> ActionOutput:
    return ActionOutput(client, lambda c, now: c, said, said)


def test_each_command_is_a_goal_and_a_replaced_one_is_no_failure(
        output: ActionOutput, client: Client, said: Said) -> None:
    for _ in range(3):
        output.send(command(), 0)
    first, second, third = (client.answer() for _ in range(3))
    first.end(GoalStatus.STATUS_CANCELED, error_code=-1)    # as ros2_controllers ends it
    second.end(GoalStatus.STATUS_ABORTED)
    third.end(GoalStatus.STATUS_SUCCEEDED, error_code=0)
    assert len(client.goals) == 3
    assert output.counts == GoalCounts(sent=3)
    assert said.texts == []


def test_a_rejected_goal_is_counted_and_told_and_what_runs_goes_on(
        output: ActionOutput, client: Client, said: Said) -> None:
    output.send(command(), 0)
    running = client.answer()
    output.send(command(), 0)
    client.answer(accepted=False)
    assert output.counts == GoalCounts(sent=2, rejected=1)
    assert said.texts == ['a goal was rejected']
    assert not running.cancelled


def test_a_failed_goal_is_told_with_its_code_and_words(
        output: ActionOutput, client: Client, said: Said) -> None:
    output.send(command(), 0)
    client.answer().end(GoalStatus.STATUS_ABORTED, error_code=-4, error_string='elbow is off')
    assert output.counts.failed == 1
    assert said.texts == ['a goal was aborted, error_code -4, elbow is off']


def test_a_tolerance_violated_while_the_next_goal_is_on_its_way_is_a_failure_too(
        output: ActionOutput, client: Client, said: Said) -> None:
    output.send(command(), 0)
    first = client.answer()
    output.send(command(), 0)
    first.end(GoalStatus.STATUS_ABORTED, error_code=-4)
    assert output.counts.failed == 1


def test_p37_where_the_goal_of_on_stop_is_rejected_what_runs_is_cancelled(
        output: ActionOutput, client: Client, said: Said) -> None:
    output.send(command(), 0)
    running = client.answer()
    output.send(command(), 0)
    also = client.answer()
    running.end(GoalStatus.STATUS_CANCELED)
    output.send(command(), 0, stop=True)
    client.answer(accepted=False)
    assert also.cancelled
    assert not running.cancelled       # it has ended
    assert said.texts == ['the goal of on_stop was rejected; what ran was cancelled']


def test_without_a_server_nothing_is_sent_and_it_is_told(
        output: ActionOutput, client: Client, said: Said) -> None:
    client.ready = False
    output.send(command(), 0)
    assert client.goals == []
    assert output.counts == GoalCounts(unsent=1)
    assert said.texts == ['no action server is there; nothing was sent']


def test_a_goal_that_got_lost_is_counted_when_a_newer_one_is_answered(
        output: ActionOutput, client: Client) -> None:
    output.send(command(), 0)
    output.send(command(), 0)
    client._futures.pop(0)
    client.answer()
    assert output.counts.unanswered == 1
    output.flush(0.0)
    assert not output._asked


def test_flush_returns_when_the_last_goal_is_answered(output: ActionOutput, client: Client) -> None:
    output.send(command(), 0, stop=True)
    flushed = threading.Event()
    thread = threading.Thread(target=lambda: (output.flush(10.0), flushed.set()))
    thread.start()
    assert not flushed.is_set()
    client.answer()
    assert flushed.wait(5)
    thread.join()


def test_goals_that_are_sent_from_another_thread_are_all_answered(probe: Probe) -> None:
    """Over rclpy, with a server that rejects every third goal."""
    name = f'{namespace()}/move'
    seen: list[int] = []

    def decide(goal: Any) -> GoalResponse:
        seen.append(goal.max_ticks)
        return GoalResponse.REJECT if goal.max_ticks % 3 == 0 else GoalResponse.ACCEPT

    def run(handle: Any) -> ExecutePolicy.Result:
        handle.succeed()
        return ExecutePolicy.Result()
    server = probe.inside(lambda: ActionServer(
        probe.node, ExecutePolicy, name, run, goal_callback=decide,
        cancel_callback=lambda _: CancelResponse.ACCEPT))
    client = probe.inside(lambda: GoalClient(probe.node, ExecutePolicy, name))
    said = Said()
    output = ActionOutput(client, lambda c, now: ExecutePolicy.Goal(max_ticks=now), said, said)
    until(client.server_is_ready, 'the server is not discovered')
    for i in range(60):
        output.send(command(), i)
        if i % 5 == 4:                 # the server's queue holds ten
            output.flush(20.0)
    assert not output._asked
    assert sorted(seen) == list(range(60))
    assert output.counts.rejected == 20
    assert output.counts.unanswered == 0
    probe.inside(output.close)
    probe.inside(server.destroy)


# -- control_msgs ---------------------------------------------------------------------------


def fake_control_msgs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two actions with the fields of control_msgs 6.8 that are used, without type support."""
    class Follow:
        class Goal:
            def __init__(self, *, trajectory: Any) -> None:
                self.trajectory = trajectory

    class Gripper:
        class Goal:
            def __init__(self) -> None:
                self.command = SimpleNamespace(position=0.0, max_effort=0.0)
    module = ModuleType('control_msgs.action')
    for name, kind in (('FollowJointTrajectory', Follow), ('GripperCommand', Gripper)):
        kind.__import_type_support__ = None
        setattr(module, name, kind)
    monkeypatch.setitem(sys.modules, 'control_msgs', ModuleType('control_msgs'))
    monkeypatch.setitem(sys.modules, 'control_msgs.action', module)


def builder(kind: str) -> Any:
    return conversions.action_builder(SimpleNamespace(type=kind, path='outputs.arm'))[1]


def test_a_command_becomes_a_trajectory_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_control_msgs(monkeypatch)
    trajectory = builder(FOLLOW)(command(FOLLOW, 0.5, 0.75), 10**18).trajectory
    assert trajectory.joint_names == ['j0']
    assert [list(p.positions) for p in trajectory.points] == [[0.5], [0.75]]
    assert [p.time_from_start.nanosec for p in trajectory.points] == [10**8, 2 * 10**8]
    assert trajectory.header.stamp.sec == 0


def test_a_command_becomes_a_gripper_position(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_control_msgs(monkeypatch)
    assert builder(GRIPPER)(command(GRIPPER, 0.03), 0).command.position == 0.03


@pytest.mark.parametrize('kind', [FOLLOW, GRIPPER])
def test_without_control_msgs_it_says_what_to_install(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'control_msgs', None)
    monkeypatch.setenv('ROS_DISTRO', 'jazzy')
    with pytest.raises(Refusal, match='apt install ros-jazzy-control-msgs') as refused:
        builder(kind)
    assert refused.value.code is Code.UNSUPPORTED


def test_without_control_msgs_configure_refuses_and_the_node_lives(
        serve: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'control_msgs', None)
    path = tmp_path / 'follow.yaml'
    arm = (POLICIES / 'arm.yaml').read_text()
    path.write_text(arm.replace('trajectory_msgs/msg/JointTrajectory', FOLLOW))
    node: Served = serve(path, activate=False)
    failure = type(node.inside(node.node.trigger_configure)).FAILURE
    assert node.inside(node.node.trigger_configure) == failure
    status = node.inside(node.node._status.snapshot)
    assert 'UNSUPPORTED' in status.last_refusal
    assert 'control-msgs' in status.last_refusal
