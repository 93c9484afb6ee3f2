"""Behaviours against a real policy node: success only where the answer says so; nothing blocks."""
from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
import sys
import threading
from typing import Any

from py_trees.common import ParallelPolicy, Status
from py_trees.composites import Parallel, Sequence
import pytest

import flashrt_ros.clients as clients
from flashrt_ros.clients.behaviours import (
    ExecutePolicy,
    RestoreCapsule,
    Rollback,
    SaveCapsule,
    Stop,
)
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import CapsuleEvent, PolicyStatus
from test.clients.trees import Ticker, board
from test.clients.world import World
from test.node.harness import Probe, Served, until
from test.node.robot import Robot

Serve = Callable[..., Served]


@pytest.fixture
def robot(probe: Probe, serve: Serve) -> Robot:
    made = Robot(probe, serve('arm').name)
    made.say()
    made.live()
    return made


def test_save_execute_and_restore_in_sequence(probe: Probe, robot: Robot) -> None:
    client = robot.client
    root = Sequence('root', memory=True, children=[
        ExecutePolicy('first', client, max_ticks=3),
        SaveCapsule('save', client, 'three', note='by a tree'),
        ExecutePolicy('second', client, max_ticks=4),
        RestoreCapsule('back', client, 'three'),
        Rollback('again', client),
    ])
    assert Ticker(probe, root).end() is Status.SUCCESS
    assert board('save', 'capsule').tick == 3
    assert board('back', 'capsule').id == board('save', 'capsule').id
    assert [board(b.name) for b in root.children] == [Code.OK] * 5
    assert board('back', 'epoch') > board('save', 'epoch') > 1
    assert board('second', 'capsule').name == 'three'    # newest when the goal ended
    kinds = [m.kind for m in robot.events.count(3)]
    assert kinds == [CapsuleEvent.SAVED, CapsuleEvent.RESTORED, CapsuleEvent.ROLLED_BACK]


@pytest.mark.parametrize(('make', 'code'), [
    (lambda c: RestoreCapsule('x', c, 'nobody'), Code.NOT_FOUND),
    (lambda c: SaveCapsule('x', c, 'origin'), Code.INVALID_NAME),
    (lambda c: Rollback('x', c, capsules=3), Code.NOTHING_TO_ROLL_BACK),
    (lambda c: RestoreCapsule('x', c, 'origin', if_epoch=999), Code.STALE_EPOCH),
    (lambda c: ExecutePolicy('x', c, if_epoch=999), Code.STALE_EPOCH),
    (lambda c: ExecutePolicy('x', c, max_duration_s=-1.0), Code.INVALID_ARGUMENT),
], ids=lambda v: v.name if isinstance(v, Code) else '')
def test_a_refusal_is_failure_with_its_code(probe: Probe, robot: Robot, make: Any,
                                            code: Code) -> None:
    behaviour = make(robot.client)
    assert Ticker(probe, behaviour).end() is Status.FAILURE
    assert board('x') == code
    assert behaviour.feedback_message == board('x', 'message') != ''


def test_an_unconfigured_node_answers_and_the_tree_fails(probe: Probe, serve: Serve) -> None:
    client = probe.client(serve(None, activate=False).name)
    for make in (SaveCapsule, Stop, RestoreCapsule, ExecutePolicy):     # Stop: a Trigger
        assert Ticker(probe, make('x', client)).end() is Status.FAILURE
        assert board('x') == Code.NOT_CONFIGURED
        assert 'configure it first' in board('x', 'message')


def test_values_may_come_from_functions(probe: Probe, robot: Robot) -> None:
    names = iter(['a', 'b'])
    save = SaveCapsule('save', robot.client, lambda: next(names))
    for name in 'ab':
        assert Ticker(probe, save).end() is Status.SUCCESS
        assert board('save', 'capsule').name == name


def test_no_tick_waits_for_the_node(probe: Probe, serve: Serve) -> None:
    """The node's executor is held while the tree is ticked and halted: every tick returns."""
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say()
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(20)
    root = Parallel('root', ParallelPolicy.SuccessOnAll(synchronise=True), children=[
        SaveCapsule('save', robot.client), Stop('stop', robot.client),
        RestoreCapsule('restore', robot.client, 'origin'), Rollback('rollback', robot.client),
        ExecutePolicy('execute', robot.client)])
    ticker = Ticker(probe, root)
    task = node.executor.create_task(hold)
    assert held.wait(20)
    try:
        for _ in range(5):
            assert ticker.once() is Status.RUNNING
        assert [c.status for c in root.children] == [Status.RUNNING] * 5
        ticker.halt()
        assert root.status is Status.INVALID
    finally:
        go.set()
    until(task.done, 'the node does not go on')
    assert robot.call('list_capsules').success     # and it still serves


def test_p10_a_save_succeeds_while_an_inference_is_held(probe: Probe, serve: Serve, gate: Any
                                                        ) -> None:
    robot = Robot(probe, serve('arm').name)
    robot.say([101.0, 0.0, 0.0])
    robot.live()
    goal = ExecutePolicy('goal', robot.client)
    goal_ticker = Ticker(probe, goal)
    assert goal_ticker.once() is Status.RUNNING
    assert gate.ENTERED.wait(20)
    assert Ticker(probe, SaveCapsule('save', robot.client)).end() is Status.SUCCESS
    assert not gate.GATE.is_set()
    assert board('save', 'capsule').tick == 0
    gate.GATE.set()
    goal_ticker.halt()
    robot.wait_phase('HOLD', start=len(robot.status.messages) - 1)


def test_p18_a_burst_of_behaviours_gets_one_answer_each(probe: Probe, robot: Robot) -> None:
    saves = [SaveCapsule(f's{i}', robot.client) for i in range(60)]
    root = Parallel('root', ParallelPolicy.SuccessOnAll(synchronise=True),
                    children=[ExecutePolicy('goal', robot.client, max_ticks=20), *saves])
    assert Ticker(probe, root).end() is Status.SUCCESS
    ids = [board(s.name, 'capsule').id for s in saves]
    assert len(set(ids)) == 60
    assert len(robot.events.count(60)) == 60


def test_p37_a_halted_goal_stops_the_robot_where_it_is(world: World) -> None:
    ticker = Ticker(world.probe, world.execute('goal', 0))
    robot = world.robot
    n = len(robot.actions.messages)
    ticker.until(lambda: len(robot.actions.messages) > n + 3, 'actions')
    world.move([0.3, 0.2, 0.1])
    n = len(robot.status.messages)
    ticker.halt()
    robot.wait_phase('HOLD', start=n)
    until(lambda: list(robot.actions.messages[-1].points[-1].positions)
          == pytest.approx(robot.position), 'on_stop')


def test_p40_a_new_goal_of_the_tree_preempts_and_never_two_run(probe: Probe, robot: Robot
                                                               ) -> None:
    first, second = (ExecutePolicy(n, robot.client) for n in ('first', 'second'))
    one, two = Ticker(probe, first), Ticker(probe, second)
    one.until(lambda: robot.actions.messages, 'an action')
    two.once()
    assert one.end() is Status.FAILURE
    assert board('first') == Code.PREEMPTED
    two.halt()
    n = len(robot.actions.messages)
    robot.actions.wait(start=n - 1)
    until(lambda: robot.status.messages[-1].phase == PolicyStatus.HOLD, 'no HOLD')


def test_a_goal_that_is_late_after_a_stop_starts_nothing(probe: Probe, serve: Serve) -> None:
    """The node is held; the tree sends a goal and is halted by a stop that overtakes it."""
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.say()
    assert Ticker(probe, SaveCapsule('s', robot.client)).end() is Status.SUCCESS
    stale = robot.client.epoch
    assert stale > 0
    assert robot.call('stop').success                       # the epoch has moved on
    late = probe.inside(lambda: robot.client.execute(if_epoch=stale))
    assert robot.result(late).code == Code.STALE_EPOCH
    assert not robot.actions.messages


def test_a_goal_after_a_stop_of_its_own_tree_is_sent_with_the_epoch_it_was_told(
        probe: Probe, robot: Robot) -> None:
    """A Trigger's answer carries no epoch: the client may learn of it only from the refusal."""
    probe.inside(lambda: [probe.node.destroy_subscription(s)     # hear nothing of the status
                          for s in robot.client._subscriptions])
    root = Sequence('root', memory=True, children=[
        SaveCapsule('save', robot.client), Stop('stop', robot.client),
        ExecutePolicy('goal', robot.client, max_ticks=2)])
    assert Ticker(probe, root).end() is Status.SUCCESS
    assert board('goal') == Code.OK


def test_the_epoch_of_a_result_is_the_one_after_its_goal(probe: Probe, robot: Robot) -> None:
    assert Ticker(probe, ExecutePolicy('goal', robot.client, max_ticks=2)).end() is Status.SUCCESS
    assert robot.call('list_capsules').epoch == board('goal', 'epoch') == robot.client.epoch


@pytest.mark.parametrize('module', ['calls', 'behaviours', 'scope'])
def test_no_module_of_a_tree_spins_a_node_or_waits(module: str) -> None:
    banned = {'spin', 'spin_once', 'spin_until_future_complete', 'sleep', 'wait', 'wait_for',
              'wait_for_service', 'wait_for_server', 'join', 'acquire'}
    source = Path(clients.__path__[0]) / f'{module}.py'
    called = {n.func.attr for n in ast.walk(ast.parse(source.read_text()))
              if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    assert not called & banned


def test_a_goal_is_sent_again_with_an_epoch_that_has_begun_anew(probe: Probe, robot: Robot) -> None:
    """A client that last heard of another configure is far ahead of this one."""
    probe.inside(lambda: setattr(robot.client, 'epoch', 1000))
    assert Ticker(probe, ExecutePolicy('goal', robot.client, max_ticks=2)).end() is Status.SUCCESS


def test_without_py_trees_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch
                                                          ) -> None:
    monkeypatch.setitem(sys.modules, 'py_trees.behaviour', None)
    for module in ('behaviours', 'scope'):
        monkeypatch.delitem(sys.modules, f'flashrt_ros.clients.{module}', raising=False)
    with pytest.raises(ImportError, match=r'flashrt_ros\[trees\]'):
        import flashrt_ros.clients.scope  # noqa: F401
