"""What the node tells of itself holds nothing up, keeps its order, and is never endless."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashrt_ros.msg import CapsuleEvent
from flashrt_ros.node import telling
from test.node.harness import POLICIES, Probe, Served, held, until
from test.node.robot import Robot

Serve = Callable[..., Served]


def test_neither_an_action_nor_an_answer_waits_for_what_is_told(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.drive()
    robot.wait_phase('RUNNING')
    before = len(robot.events.messages)
    with held(node.node._telling.tell):
        saved = robot.call('save_capsule', name='a')
        actions = len(robot.actions.messages)
        robot.actions.count(actions + 5)
        restored = robot.call('restore_capsule', name='a')
        assert saved.success
        assert restored.success
        assert len(robot.events.messages) == before
    kinds = [m.kind for m in robot.events.count(before + 2)[before:]]
    assert kinds == [CapsuleEvent.SAVED, CapsuleEvent.RESTORED]
    robot.wait_phase('HOLD')


def test_the_present_is_told_once_for_many_changes_and_never_an_old_one(
        probe: Probe, serve: Serve) -> None:
    node = serve('prompted')
    robot = Robot(probe, node.name)
    before = len(robot.status.messages)
    with held(node.node._telling.tell):
        for _ in range(20):
            assert robot.call('reset').success
    robot.status.wait(lambda m: m.epoch == node.node.runner.epoch, start=before)
    assert len(robot.status.messages) - before <= 2


def test_what_does_not_fit_is_dropped_counted_and_does_no_harm(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, 'MAX_WAITING', 4)
    node = serve('prompted')
    robot = Robot(probe, node.name)
    with held(node.node._telling.tell):
        for i in range(8):
            assert robot.call('save_capsule', name=f's{i}').success
    robot.events.wait(lambda m: m.capsule.name == 's0')
    assert node.node._telling.dropped >= 4
    assert robot.call('save_capsule', name='after').success
    robot.events.wait(lambda m: m.capsule.name == 'after')


def test_a_failure_while_telling_is_logged_and_the_next_is_told(
        probe: Probe, serve: Serve) -> None:
    node = serve('prompted')
    robot = Robot(probe, node.name)

    def fail() -> None:
        raise RuntimeError('on purpose')
    node.node._telling.tell(fail)
    assert robot.call('save_capsule', name='a').success
    robot.events.wait(lambda m: m.capsule.name == 'a')


def test_a_node_that_leaves_tells_what_is_left_and_then_nothing() -> None:
    node = Served(POLICIES / 'prompted.yaml', python_modules=['held_policy'])
    told: list[str] = []
    node.node._telling.tell(lambda: told.append('before'))
    node.close()
    node.node._telling.tell(lambda: told.append('after'))
    assert told == ['before']


def test_a_chunk_that_waits_long_keeps_no_messages(
        probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    records: list[Any] = []
    chunk = node.node._sink.chunk

    def keep(record: Any) -> None:
        chunk(record)
        records.append(record)
    monkeypatch.setattr(node.node._sink, 'chunk', keep)
    robot.say()
    robot.live()
    with held(node.node._telling.tell):
        robot.start()
        robot.actions.count(len(robot.actions.messages) + 40)
        until(lambda: len(records) > 20, 'no chunks')
        assert node.node._telling.behind
        assert all(e._digest is None for e in records[-1].latched)
