"""capsule_scope_try_catch.xml. The engine that Python has (4.8) knows no TryCatch, so here its tick
and its halt, as version 4.9 has them, are made of what 4.8 knows: a Fallback, and one tick of the
catch branch after the halt, on the same blackboard."""
from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip('behaviortreepy', reason='no BehaviorTree.CPP engine on this platform')

from flashrt_ros.core.errors import Code
from flashrt_ros.msg import CapsuleEvent
from test.clients.bt_engine import FAILURE, SUCCESS, TREES, Engine
from test.clients.test_bt_scope import RECOVER, TASK, reach_task, trees
from test.clients.world import AT_HOME, AWAY, World
from test.node.harness import until

FILE = (TREES / 'capsule_scope_try_catch.xml').read_text()


class TryCatch(Engine):
    """CapsuleScope as the root, and what TryCatch does at a halt."""

    def __init__(self, world: World) -> None:
        root = ElementTree.fromstring(FILE)
        node = next(iter(root.iter('TryCatch')))
        assert node.attrib == {'catch_on_halt': 'true'}
        catch = list(node)[-1]
        node.tag = 'Fallback'
        node.attrib = {}
        node.remove(catch)
        wrapped = ElementTree.SubElement(node, 'ForceFailure')
        wrapped.append(catch)
        side = ElementTree.SubElement(root, 'BehaviorTree', ID='Catch')
        side.append(catch)
        super().__init__(world.probe, world.client, ElementTree.tostring(root, encoding='unicode'),
                         trees(Task=TASK, Recover=RECOVER), main='CapsuleScope')
        self.catch = self.another('Catch')

    def halt(self) -> None:
        """Halt the try branch, tick the catch branch once, halt it too."""
        def work() -> None:
            self.tree.halt_tree()
            self.catch.tick_exactly_once()
            self.catch.halt_tree()
        self.probe.inside(work)
        self._check()


@pytest.fixture
def tree(world: World) -> TryCatch:
    return TryCatch(world)


def test_p25_a_halt_stops_and_restores_at_once_and_the_next_entry_finds_it_done(
        world: World, tree: TryCatch) -> None:
    reach_task(tree)
    tree.halt()
    world.robot.events.wait(lambda m: m.kind == CapsuleEvent.RESTORED)
    assert world.tick_number() == 2
    reach_task(tree)
    assert tree.ticked == ['task', 'task']                   # nothing to recover
    assert world.tick_number() == 5
    tree.says['task'] = SUCCESS
    assert tree.end() == SUCCESS
    world.no_capsules()
    assert len(world.restored()) == 1


def test_p25_a_halt_far_from_the_witness_is_repaired_at_the_next_entry(world: World, tree: TryCatch
                                                                       ) -> None:
    reach_task(tree)
    world.move(AWAY)
    tree.halt()
    refused = world.robot.events.wait(lambda m: m.kind == CapsuleEvent.REFUSED)
    assert refused.code == Code.ROBOT_MOVED
    tree.until(lambda: 'recover' in tree.ticked, 'recover')
    world.move(AT_HOME)
    tree.says['recover'] = SUCCESS
    reach_task(tree)
    assert world.tick_number() == 5
    assert len(world.restored()) == 1


def test_p25_a_failed_task_recovers_first_and_is_restored_once(world: World, tree: TryCatch
                                                               ) -> None:
    reach_task(tree)
    tree.says |= {'task': FAILURE, 'recover': SUCCESS}
    assert tree.end() == FAILURE
    assert tree.ticked == ['task', 'recover']
    assert world.tick_number() == 2
    world.no_capsules()
    assert len(world.restored()) == 1


def test_p37_a_halt_stops_the_robot_though_the_task_cannot_cancel(world: World) -> None:
    """~/stop needs no goal handle: a node that was halted before it had one leaves its goal."""
    tree = TryCatch(world)
    reach_task(tree)
    n = len(world.robot.actions.messages)
    goal = world.probe.inside(lambda: world.client.execute())    # of somebody without a handle
    until(lambda: len(world.robot.actions.messages) > n + 3, 'no actions')
    tree.halt()
    assert world.robot.result(goal).code in (Code.STOPPED, Code.RESTORED)


def test_both_files_repair_alike() -> None:
    def repair(text: str) -> str:
        return text[text.index('<BehaviorTree ID="CapsuleRepair">'):]
    assert repair(FILE) == repair((TREES / 'capsule_scope.xml').read_text())
