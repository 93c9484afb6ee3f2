"""Inputs and steps are served on a thread of their own: nothing else of the node holds them up."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import threading

from rclpy.executors import MultiThreadedExecutor

from flashrt_ros.core.errors import Code
from test.node.harness import Probe, Served
from test.node.robot import Robot

Serve = Callable[..., Served]


@contextmanager
def busy(node: Served) -> Iterator[None]:
    """Keep the node's executor in a callback that does not return."""
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(20)
    node.executor.create_task(hold)
    assert entered.wait(5)
    try:
        yield
    finally:
        gate.set()


def intakes() -> int:
    return sum(t.name == 'intake' for t in threading.enumerate())


def test_steps_go_on_while_a_callback_of_the_executor_does_not_return(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say()
    robot.live()
    robot.start()
    with busy(node):
        robot.actions.count(len(robot.actions.messages) + 10)


def test_a_robot_whose_inputs_stop_is_stopped_while_the_executor_is_busy(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say()
    robot.live()
    execution = robot.start()
    with busy(node):
        robot.silent()
        robot.wait_phase('HOLD')
    assert robot.result(execution).code == Code.INPUT_STALE


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
