"""Inputs and steps are served on a thread of their own: nothing else of the node holds them up."""
from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any

import pytest
from rclpy.executors import MultiThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter

from flashrt_ros.core.errors import Code
from flashrt_ros.node import intake, poll
from test.node.harness import POLICIES, Probe, Served, until
from test.node.robot import Robot

Serve = Callable[..., Served]


def intakes() -> int:
    return sum(t.name == 'intake' for t in threading.enumerate())


def test_steps_go_on_while_a_callback_of_the_executor_does_not_return(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.drive()
    with node.busy():
        robot.actions.count(len(robot.actions.messages) + 10)


def test_motion_ends_where_the_executor_answers_nothing_for_a_second(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    execution = robot.drive()
    told = len(robot.status.messages)
    with node.busy():
        robot.wait_phase('HOLD', start=told)
        sent = len(robot.actions.messages)
    result = robot.result(execution)
    assert result.code == Code.INTERNAL
    assert 'does not return' in result.message
    assert len(robot.actions.messages) == sent
    assert robot.start()                # it works again once somebody answers


def test_no_other_executor_serves_the_inputs(probe: Probe, serve: Serve) -> None:
    node = serve('arm', activate=False)
    node.inside(node.node.trigger_configure)
    group = node.node._intake.group
    subscription = node.node._inputs._subscriptions[0]
    assert subscription.callback_group is group
    assert not group.can_execute(subscription)
    assert not node.inside(lambda: group.can_execute(subscription))
    other = MultiThreadedExecutor(context=node.context)
    assert not other.can_execute(subscription)
    other.shutdown(timeout_sec=0)


def test_the_thread_ends_with_the_configuration(probe: Probe, serve: Serve) -> None:
    before = intakes()
    node = serve('arm', activate=False)
    for _ in range(3):
        node.inside(node.node.trigger_configure)
        assert intakes() == before + 1
        node.inside(node.node.trigger_cleanup)
        assert intakes() == before
    node.inside(node.node.trigger_configure)
    assert node.node.close(2.0)
    assert intakes() == before


def test_timers_are_cancelled_on_the_thread_that_serves_them(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    # rclpy in Jazzy never serves a timer again that was cancelled while it was being taken
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say()
    robot.live()
    cancelled: dict[str, str] = {}
    done = threading.Event()
    for name, timer in (('step', node.node._step_timer), ('poll', node.node._poll._timer)):
        def cancel(name: str = name, original: Any = timer.cancel) -> None:
            cancelled[name] = threading.current_thread().name
            original()
            if len(cancelled) == 2:
                done.set()
        monkeypatch.setattr(timer, 'cancel', cancel)
    robot.start()
    robot.silent()
    robot.say([float('nan')] * 3)       # the intake ends the goal
    robot.wait_phase('HOLD')
    node.inside(node.node.trigger_deactivate)
    assert done.wait(5)
    assert cancelled == {'step': 'intake', 'poll': node.thread.name}
    node.inside(node.node.trigger_activate)
    robot.say([0.0] * 3)
    robot.live()
    robot.start()
    robot.actions.count(len(robot.actions.messages) + 5)


def test_other_timers_that_come_and_go_do_not_hide_the_step_timer(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', status_hz=5.0)
    [seen] = node.node._intake._executor.get_nodes()
    assert seen.timers == (node.node._step_timer,)
    timers = seen.timers
    node.inside(lambda: node.node.set_parameters([Parameter('status_hz', value=4.0)]))
    assert seen.timers is timers
    assert not seen.services
    assert [s.topic_name for s in seen.subscriptions] == [f'{node.namespace}/joint_states']


def test_an_intake_that_fails_for_good_stops_the_robot_until_it_is_configured_anew(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    execution = robot.drive()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError('on purpose')
    with monkeypatch.context() as patch:
        patch.setattr(intake._Executor, 'spin_once', broken)
        assert robot.result(execution).code == Code.FAULT
        robot.wait_phase('FAULT')
        assert intakes() == 0
    node.inside(node.node.trigger_deactivate)
    node.inside(node.node.trigger_cleanup)
    node.inside(node.node.trigger_configure)
    node.inside(node.node.trigger_activate)
    robot.wait_phase('HOLD', start=len(robot.status.messages) - 1)
    robot.start()


def test_a_node_that_is_leaving_does_not_move_again(probe: Probe, serve: Serve) -> None:
    good = TransitionCallbackReturn.SUCCESS
    node = serve('arm', activate=False)
    assert node.inside(node.node.trigger_configure) == good
    node.node.halt('SIGINT')            # as from the thread that watches signals
    assert node.inside(node.node.trigger_activate) != good
    assert not node.node.runner._hub.active
    node.inside(node.node.trigger_cleanup)
    assert node.inside(node.node.trigger_configure) != good
    assert node.node.runner is None


def test_a_node_that_is_destroyed_without_more_ado_has_stopped(
        probe: Probe, serve: Serve) -> None:
    before = intakes()
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.drive()
    node.inside(node.node.destroy_node)
    assert intakes() == before
    assert node.node.runner is None


def test_a_thread_that_is_stuck_in_a_message_stops_the_robot(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    execution = robot.drive()
    gate = threading.Event()
    parse = node.node.runner.observation.parse

    def stuck(*message: Any) -> Any:
        gate.wait(20)
        return parse(*message)
    monkeypatch.setattr(node.node.runner.observation, 'parse', stuck)
    result = robot.result(execution)
    gate.set()
    assert result.code == Code.INTERNAL
    assert 'has not returned' in result.message


def test_a_thread_that_ends_late_does_not_make_its_successor_deaf(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    gate, entered = threading.Event(), threading.Event()
    own = node.node._intake
    parse = node.node.runner.observation.parse

    def stuck(*message: Any) -> Any:
        entered.set()
        gate.wait(20)
        return parse(*message)
    with monkeypatch.context() as patch:
        patch.setattr(node.node.runner.observation, 'parse', stuck)
        robot.live()
        assert entered.wait(5)
        late = own._thread
        node.inside(lambda: own.stop(0.05))
    node.inside(own.start)
    until(lambda: own.group.thread == own._thread.ident, 'the new thread has not begun')
    gate.set()
    late.join(5)
    robot.start()


def test_destroying_a_node_with_an_open_goal_leaves_its_executor_alone(probe: Probe) -> None:
    node = Served(POLICIES / 'arm.yaml', python_modules=['held_policy'])
    failures: list[BaseException] = []
    node.ended.set()                    # plain rclpy from here on: nothing catches what escapes
    node.executor.create_task(lambda: None)
    node.thread.join(5)

    def spin() -> None:
        try:
            node.executor.spin()
        except BaseException as error:
            failures.append(error)
    node.thread = threading.Thread(target=spin, daemon=True)
    node.thread.start()
    try:
        node.activate()
        robot = Robot(probe, node.name)
        robot.drive()
        node.inside(node.node.destroy_node)
        assert node.inside(lambda: 7) == 7
        assert not failures
    finally:
        node.context.try_shutdown()
        node.thread.join(5)
        node.executor.shutdown(timeout_sec=0)


def test_a_stall_is_believed_when_it_is_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(poll.time, 'monotonic', lambda: now[0])
    stall = poll.Stall()

    def look(at: float, since: float | None) -> float:
        now[0] = at
        return stall.confirmed(since)
    assert look(100.0, None) == 0
    assert look(100.5, 100.0) == 0      # not long yet
    assert look(105.0, 100.0) == 0      # the whole process may have been paused
    assert look(105.1, 100.0) == 0
    assert look(105.3, 100.0) == pytest.approx(5.3)
    assert look(105.4, 105.35) == 0     # at work again
    assert look(110.0, 105.35) == 0
    assert look(110.1, None) == 0
    assert look(110.5, 105.35) == 0     # anew
