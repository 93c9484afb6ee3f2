"""capsule_scope.xml and capsule_scope_triggers.xml in the BehaviorTree.CPP engine (4.8), against a
real policy node (P25, P40)."""
from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip('behaviortreepy', reason='no BehaviorTree.CPP engine on this platform')

from flashrt_ros.core.errors import Code
from flashrt_ros.msg import ActionChunk, CapsuleEvent, PolicyStatus
from test.clients.bt_engine import FAILURE, RUNNING, SUCCESS, TREES, Engine
from test.clients.world import AT_HOME, AWAY, World
from test.node.harness import until

SCOPE = (TREES / 'capsule_scope.xml').read_text()
TRIGGERS = (TREES / 'capsule_scope_triggers.xml').read_text()
MAIN = '<SubTree ID="CapsuleScope" _autoremap="true"/>'
TASK = '<Sequence><ExecutePolicy max_ticks="3"/><Said key="task"/></Sequence>'
RECOVER = '<Said key="recover"/>'


def trees(**bodies: str) -> str:
    """Return a file with these trees."""
    return '<root BTCPP_format="4">' + ''.join(
        f'<BehaviorTree ID="{name}">{body}</BehaviorTree>'
        for name, body in bodies.items()) + '</root>'


def engine(world: World, scope: str = SCOPE, **bodies: str) -> Engine:
    """Return the scope with a task of three ticks and a word of the test."""
    return Engine(world.probe, world.client, scope,
                  trees(**{'Main': MAIN, 'Task': TASK, 'Recover': RECOVER, **bodies}))


def reach_task(tree: Engine) -> None:
    """Tick until the task has made its ticks and waits for the test."""
    n = tree.ticked.count('task')
    tree.until(lambda: tree.ticked.count('task') > n, 'the task')


@pytest.fixture
def tree(world: World) -> Engine:
    return engine(world)


def test_success_keeps_the_new_state_and_drops_the_checkpoint(world: World, tree: Engine) -> None:
    tree.says['task'] = SUCCESS
    assert tree.end() == SUCCESS
    assert world.tick_number() == 5
    world.no_capsules()
    assert tree.end() == SUCCESS                             # nothing to repair
    assert world.tick_number() == 8
    assert world.restored() == []


def test_p25_a_failed_task_ends_after_recover_with_the_state_from_before_restored_once(
        world: World, tree: Engine) -> None:
    reach_task(tree)
    world.move(AWAY)
    tree.says['task'] = FAILURE
    tree.until(lambda: 'recover' in tree.ticked, 'recover')
    world.move(AT_HOME)
    tree.says['recover'] = SUCCESS
    assert tree.end() == FAILURE
    assert world.tick_number() == 2
    world.no_capsules()
    assert len(world.restored()) == 1


def test_p25_a_halt_is_repaired_at_the_next_entry_before_the_task(world: World, tree: Engine
                                                                  ) -> None:
    reach_task(tree)
    world.move(AWAY)
    tree.halt()
    assert world.tick_number() == 5
    tree.until(lambda: 'recover' in tree.ticked, 'recover')
    assert tree.ticked == ['task', 'recover']
    world.move(AT_HOME)
    tree.says['recover'] = SUCCESS
    reach_task(tree)
    assert tree.ticked == ['task', 'recover', 'task']
    assert world.tick_number() == 5                          # three after the two from before
    tree.says['task'] = SUCCESS
    assert tree.end() == SUCCESS
    assert len(world.restored()) == 1


def test_p25_a_repair_that_fails_keeps_the_scope_shut(world: World, tree: Engine) -> None:
    reach_task(tree)
    tree.says |= {'task': FAILURE, 'recover': FAILURE}
    assert tree.end() == FAILURE
    assert tree.end() == FAILURE                             # the repair, again
    assert tree.ticked == ['task', 'recover', 'recover']
    tree.says |= {'task': SUCCESS, 'recover': SUCCESS}
    assert tree.end() == SUCCESS
    assert len(world.restored()) == 1


def test_p25_somebody_else_has_rewound_so_nothing_is_repaired(world: World, tree: Engine) -> None:
    reach_task(tree)
    tree.halt()
    assert world.robot.call('reset').success
    reach_task(tree)
    assert tree.ticked == ['task', 'task']
    assert world.tick_number() == 3
    assert world.restored() == []


INNER = SCOPE
for name in ('CapsuleScope', 'CapsuleRepair', 'Task', 'Recover'):
    INNER = INNER.replace(f'"{name}"', f'"Inner{name}"')
IN = '<SubTree ID="InnerCapsuleScope" _autoremap="true" outer_epoch="{epoch}"/>'


def nested(world: World, inner: str = IN, task: str = TASK) -> Engine:
    """outer(3 ticks, inner(3 ticks, task), after)"""
    return Engine(world.probe, world.client, SCOPE, INNER, trees(
        Main=MAIN, InnerTask=task, Recover='<Said key="outer recover" shows="{witness}"/>',
        InnerRecover='<Said key="inner recover" shows="{witness}"/>',
        Task=f'<Sequence><ExecutePolicy max_ticks="3"/>{inner}<Said key="after"/></Sequence>'))


def test_p25_a_failure_inside_a_nested_scope_returns_through_both(world: World) -> None:
    tree = nested(world)
    reach_task(tree)
    assert world.tick_number() == 8
    tree.says |= {'task': FAILURE, 'inner recover': SUCCESS, 'outer recover': SUCCESS}
    assert tree.end() == FAILURE
    assert world.tick_number() == 2
    assert tree.ticked == ['task', 'inner recover', 'outer recover']
    assert len(world.restored()) == 2


def test_p25_an_inner_restore_does_not_make_the_outer_one_stale(world: World) -> None:
    tree = nested(world, f'<ForceSuccess>{IN}</ForceSuccess>')
    reach_task(tree)
    tree.says |= {'task': FAILURE, 'inner recover': SUCCESS, 'outer recover': SUCCESS}
    tree.until(lambda: 'after' in tree.ticked, 'the rest')
    assert world.tick_number() == 5
    tree.says['after'] = FAILURE
    assert tree.end() == FAILURE
    assert world.tick_number() == 2
    assert len(world.restored()) == 2


def test_p25_after_a_halt_the_outer_scope_repairs_and_the_inner_one_is_stale(world: World) -> None:
    tree = nested(world)
    reach_task(tree)
    tree.halt()
    tree.says |= {'outer recover': SUCCESS, 'inner recover': SUCCESS}
    reach_task(tree)
    assert tree.ticked == ['task', 'outer recover', 'task']
    assert world.tick_number() == 8
    tree.says |= {'task': SUCCESS, 'after': SUCCESS}
    assert tree.end() == SUCCESS
    world.no_capsules()
    assert len(world.restored()) == 1


def test_p25_a_rewind_two_scopes_further_in_does_not_make_the_outer_one_stale(world: World) -> None:
    tree = nested(world, task='<RestoreCapsule capsule="origin" epoch="{epoch}"/>')
    tree.until(lambda: 'after' in tree.ticked, 'the rest')
    assert world.tick_number() == 0
    tree.says |= {'after': FAILURE, 'outer recover': SUCCESS}
    assert tree.end() == FAILURE
    assert world.tick_number() == 2


def test_p25_each_scope_recovers_to_the_witness_of_its_own_capsule(world: World) -> None:
    elsewhere = [0.1, 0.0, 0.0]
    tree = nested(world, f'<Said key="between"/><ExecutePolicy max_ticks="2"/>{IN}')
    tree.until(lambda: 'between' in tree.ticked, 'the outer task')
    world.move(elsewhere)
    tree.says['between'] = SUCCESS
    reach_task(tree)
    world.move(AWAY)
    tree.says['task'] = FAILURE
    tree.until(lambda: 'inner recover' in tree.ticked, 'recover')
    world.move(elsewhere)
    tree.says['inner recover'] = SUCCESS
    tree.until(lambda: 'outer recover' in tree.ticked, 'recover')
    assert tree.shown['outer recover'].startswith('0.0;')
    assert tree.shown['inner recover'].startswith('0.1')


@pytest.mark.parametrize('node', ['ExecutePolicy', 'Forgetful'])
def test_p40_halts_before_the_acknowledgement_never_make_two_goals(world: World, node: str
                                                                   ) -> None:
    """A node that is halted before it knows its goal can cancel only later, or never: Nav2's."""
    chunks = world.probe.listen(ActionChunk, f'{world.served.name}/chunk')
    tree = engine(world, Task=f'<{node} max_ticks="0"/>', Recover='<AlwaysSuccess/>')
    goal = world.client.execute
    sent: list[Any] = []
    world.client.execute = lambda **g: (sent.append(goal(**g)), sent[-1])[1]

    def halted_early(n: int) -> bool:                        # in the tick that has sent it
        if len(sent) < n:
            return False
        assert not sent[-1].accepted.done()
        tree.tree.halt_tree()
        return True
    for n in range(1, 6):
        tree.until(lambda n=n: halted_early(n), 'a goal')
    tree.until(lambda: len(sent) == 6, 'a goal')
    n = len(world.robot.actions.messages)
    tree.until(lambda: len(world.robot.actions.messages) > n + 5, 'actions')
    ended = [world.robot.result(e).code for e in sent[:-1]]
    assert set(ended) <= {Code.CANCELLED, Code.STOPPED, Code.PREEMPTED, Code.RESTORED}
    assert not sent[-1].result.done()
    epochs = [c.epoch for c in chunks.messages]
    assert epochs == sorted(epochs)                          # no action of a goal after the next
    tree.halt()
    assert world.robot.result(sent[-1]).code == Code.CANCELLED


# -- trees without nodes of their own


def test_triggers_p25_a_failed_task_ends_with_the_state_from_before(world: World) -> None:
    tree = engine(world, TRIGGERS)
    reach_task(tree)
    assert world.tick_number() == 5
    tree.says['task'] = FAILURE
    assert tree.end() == FAILURE
    assert world.tick_number() == 2
    rolled = [m for m in world.kinds(CapsuleEvent.ROLLED_BACK)]
    assert len(rolled) == 1
    assert tree.ticked == ['task']                           # the robot had not moved


def test_triggers_p25_a_moved_robot_is_recovered_first(world: World) -> None:
    tree = engine(world, TRIGGERS)
    reach_task(tree)
    world.move(AWAY)
    tree.says['task'] = FAILURE
    tree.until(lambda: 'recover' in tree.ticked, 'recover')
    world.move(AT_HOME)
    tree.says['recover'] = SUCCESS
    assert tree.end() == FAILURE
    assert world.tick_number() == 2


def test_triggers_p25_a_halt_is_repaired_at_the_next_entry(world: World) -> None:
    tree = engine(world, TRIGGERS)
    reach_task(tree)
    tree.halt()
    assert world.tick_number() == 5
    reach_task(tree)
    assert world.tick_number() == 5
    assert len(world.kinds(CapsuleEvent.ROLLED_BACK)) == 1


def test_triggers_start_and_stop_need_no_client_for_the_goal(world: World) -> None:
    tree = engine(world, TRIGGERS, Task='<Sequence><TriggerService '
                  'service_name="policy_node/start"/><Said key="task"/></Sequence>')
    n = len(world.robot.actions.messages)
    tree.until(lambda: len(world.robot.actions.messages) > n + 3, 'actions')
    tree.says['task'] = FAILURE
    assert tree.end() == FAILURE
    until(lambda: world.robot.status.messages[-1].phase == PolicyStatus.HOLD, 'no HOLD')
    assert world.tick_number() == 2
    assert tree.status != RUNNING
