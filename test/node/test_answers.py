"""P18: every call gets one definite answer, whatever the policy is doing."""
from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any

import pytest
from sensor_msgs.msg import JointState

from flashrt_ros.core.errors import Code
from flashrt_ros.msg import CapsuleEvent
from test.node.harness import Probe, Served, matched
from test.node.robot import JOINTS, Robot

Serve = Callable[..., Served]
HELD = [200.0, 0.0, 0.0]  # as j0 it holds the tick of held_policy


def test_p18_200_saves_at_50_hz_are_all_answered_while_the_policy_runs(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', max_capsules=64)
    robot = Robot(probe, node.name)
    robot.drive()
    futures: list[Any] = []
    done = threading.Event()

    def save() -> None:
        futures.append(robot.client.save(f's{len(futures)}'))
        if len(futures) == 200:
            done.set()
            probe.node.destroy_timer(timer)
    timer = probe.inside(lambda: probe.node.create_timer(0.02, save))
    assert done.wait(15)
    answers = [probe.result(f) for f in futures]
    assert all(a.success for a in answers)
    assert len({a.capsule.id for a in answers}) == 200


def test_p18_many_clients_at_once_get_one_answer_each(probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.drive()
    others = [Probe('many') for _ in range(6)]
    try:
        clients = [o.client(node.name) for o in others]
        sent = []
        for i in range(40):
            for j, (other, client) in enumerate(zip(others, clients, strict=True)):
                call = [lambda c=client, n=f'{j}': c.save(n, overwrite=True),
                        lambda c=client: c.list(),
                        lambda c=client, n=f'{j}': c.restore(n),
                        lambda c=client, n=f'{j}': c.drop(n)][(i + j) % 4]
                sent.append((other, other.inside(call)))
        answers = [o.result(f) for o, f in sent]
    finally:
        for other in others:
            other.close()
    assert len(answers) == 240
    assert all(a.success == (a.code == Code.OK) for a in answers)
    assert {a.code for a in answers} <= {Code.OK, Code.NOT_FOUND, Code.BUSY}


def test_p10_a_save_is_answered_while_an_inference_is_held(
        probe: Probe, serve: Serve, gate: Any) -> None:
    node = serve('arm', allow_force=True)  # for HELD moves the robot, as the guard sees it
    robot = Robot(probe, node.name)
    robot.drive()
    robot.say(HELD)
    assert gate.ENTERED.wait(10)
    before = robot.call('save_capsule', name='before')
    assert before.success
    assert not gate.GATE.is_set()
    gate.GATE.set()
    answer = robot.call('restore_capsule', name='before', force=True)
    assert answer.success
    assert answer.capsule.id == before.capsule.id


def test_p18_a_restore_awaited_during_a_held_inference_keeps_nobody_waiting(
        probe: Probe, serve: Serve, gate: Any) -> None:
    node = serve('arm', allow_force=True)  # for HELD moves the robot, as the guard sees it
    robot = Robot(probe, node.name)
    robot.drive()
    assert robot.call('save_capsule', name='a').success
    robot.say(HELD)
    assert gate.ENTERED.wait(10)
    waiting = probe.inside(lambda: robot.client.restore('a', force=True))
    assert robot.call('list_capsules').success
    assert robot.call('save_capsule', name='b') is not None
    assert not waiting.done()
    robot.silent()
    gate.GATE.set()
    assert probe.result(waiting).success


def test_p18_a_policy_that_raises_leaves_a_node_that_answers(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    execution = robot.drive()
    robot.silent()
    robot.say([-200.0, 0.0, 0.0])
    result = robot.result(execution)
    assert result.code == Code.FAULT
    assert 'the policy raised' in result.message
    robot.wait_phase('FAULT')
    for verb in ('restore_capsule', 'save_capsule', 'rollback', 'start'):
        answer = robot.call(verb)
        assert not answer.success
        assert 'FAULT' in answer.message or answer.code == Code.FAULT
    assert robot.call('list_capsules').success
    node.inside(node.node.trigger_deactivate)
    node.inside(node.node.trigger_cleanup)
    node.inside(node.node.trigger_configure)
    assert robot.call('save_capsule', name='again').success


@pytest.mark.parametrize('verb', ['save', 'restore', 'list', 'stop'])
def test_p18_a_handler_whose_runner_raises_still_answers_and_the_next_call_works(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    node = serve('prompted')
    robot = Robot(probe, node.name)
    assert robot.call('save_capsule').success

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError('broken on purpose')
    service = {'save': 'save_capsule', 'restore': 'restore_capsule', 'list': 'list_capsules',
               'stop': 'stop'}[verb]
    with monkeypatch.context() as patch:
        patch.setattr(node.node.runner, verb, broken)
        answer = robot.call(service)
        assert not answer.success
        assert 'broken on purpose' in answer.message
        assert getattr(answer, 'code', Code.INTERNAL) == Code.INTERNAL
    assert robot.call(service).success


def test_p18_a_restore_on_an_otherwise_silent_node_is_answered_when_its_copy_is_done(
        probe: Probe, serve: Serve, gate: Any) -> None:
    node = serve('held_lockstep')  # no timer, status_hz 0: nothing else wakes its executor
    client = probe.client(node.name)
    joints = probe.publisher(JointState, f'{node.namespace}/joint_states')
    matched(joints)
    joints.publish(JointState(name=list(JOINTS), position=HELD))
    assert gate.ENTERED.wait(10)
    waiting = probe.inside(lambda: client.restore('origin'))
    assert probe.call(lambda: client.list()).success  # the restore was taken before
    assert not waiting.done()
    gate.GATE.set()
    assert probe.result(waiting, timeout=5).success


def test_every_verb_tells_of_itself_on_capsule_events(probe: Probe, serve: Serve) -> None:
    node = serve('prompted')
    robot = Robot(probe, node.name)
    for verb, fields, kind in (
            ('save_capsule', {'name': 'a'}, CapsuleEvent.SAVED),
            ('keep_capsule', {'name': 'a', 'pin': 1}, CapsuleEvent.KEPT),
            ('restore_capsule', {'name': 'a'}, CapsuleEvent.RESTORED),
            ('rollback', {}, CapsuleEvent.ROLLED_BACK), ('reset', {}, CapsuleEvent.RESET),
            ('drop_capsule', {'name': 'a'}, CapsuleEvent.DROPPED),
            ('restore_capsule', {'name': 'nobody'}, CapsuleEvent.REFUSED)):
        answer = robot.call(verb, **fields)
        event = robot.events.wait(lambda m, k=kind: m.kind == k)
        if hasattr(answer, 'epoch'):
            assert event.epoch == answer.epoch
