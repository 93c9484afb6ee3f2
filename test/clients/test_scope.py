"""CapsuleScope against a real policy node: exactly one restore, and never a child on a state that
is not its own (P25, and P12, P37 through a tree)."""
from __future__ import annotations

from py_trees.common import Status
from py_trees.composites import Sequence
from py_trees.decorators import Retry
from py_trees.display import unicode_tree
import pytest

from flashrt_ros.clients.behaviours import ExecutePolicy, RestoreCapsule
from flashrt_ros.clients.scope import CapsuleScope, Stage
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import ActionChunk, CapsuleEvent, PolicyStatus
from test.clients.trees import Hasty, Leaf, Ticker, board
from test.clients.world import AT_HOME, AWAY, World
from test.node.harness import until


def test_success_keeps_the_new_state_and_drops_the_checkpoint(world: World) -> None:
    scope = CapsuleScope('scope', world.execute('child', 3), world.client)
    assert Ticker(world.probe, scope).end() is Status.SUCCESS
    assert board('scope', 'capsule').tick == 2
    assert world.tick_number() == 5
    world.no_capsules()
    assert world.restored() == []


def test_p25_a_failed_child_ends_with_the_state_from_before_restored_once(world: World) -> None:
    recover = Leaf('recover', Status.SUCCESS)
    child = Sequence('child', memory=True,
                     children=[world.execute('some', 4), Leaf('no', Status.FAILURE)])
    scope = CapsuleScope('scope', child, world.client, recover=recover)
    assert Ticker(world.probe, scope).end() is Status.FAILURE
    assert world.tick_number() == 2
    assert board('scope') == Code.OK
    assert 'restored' in board('scope', 'message')
    assert (recover.entered, scope.dirty) == (1, False)
    world.no_capsules()
    assert world.restored() == [scope.capsule.name]


def test_p25_recover_moves_the_robot_to_the_witness_before_the_restore(world: World) -> None:
    wanted: list[list[float]] = []

    def look() -> None:
        capsule = board('scope', 'capsule')
        witness = dict(zip(capsule.witness_names, capsule.witness, strict=True))
        wanted.append([witness[f'joint_position.j{i}'] for i in range(3)])
    recover, child = Leaf('recover', then=look), Leaf('child')
    scope = CapsuleScope('scope', child, world.client, recover=recover)
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: child.ticks, 'the child')
    world.move(AWAY)
    child.says = Status.FAILURE
    ticker.until(lambda: wanted, 'recover')
    world.move(wanted[0])
    recover.says = Status.SUCCESS
    assert ticker.end() is Status.FAILURE
    assert wanted[0] == AT_HOME
    assert world.restored() == [scope.capsule.name]


def test_p25_without_recover_a_moved_robot_is_failure_and_the_scope_stays_shut(world: World
                                                                               ) -> None:
    child = Leaf('child', Status.RUNNING)
    scope = CapsuleScope('scope', child, world.client)
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: child.ticks, 'the child')
    world.move(AWAY)
    child.says = Status.FAILURE
    assert ticker.end() is Status.FAILURE
    assert board('scope') == Code.ROBOT_MOVED
    assert scope.dirty
    ticks = child.ticks
    assert ticker.end() is Status.FAILURE               # again, and the child is not ticked
    assert (board('scope'), child.ticks) == (Code.ROBOT_MOVED, ticks)
    world.move(AT_HOME)
    child.says = Status.SUCCESS
    assert ticker.end() is Status.SUCCESS               # restored, saved, ticked
    assert child.ticks == ticks + 1
    assert len(world.restored()) == 1


def test_p25_a_halt_stops_and_restores_at_once_where_the_guard_permits(world: World) -> None:
    scope = CapsuleScope('scope', world.execute('child', 0), world.client)
    ticker = Ticker(world.probe, scope)
    n = len(world.robot.actions.messages)
    ticker.until(lambda: len(world.robot.actions.messages) > n + 3, 'actions')
    ticker.halt()
    event = world.robot.events.wait(lambda m: m.kind == CapsuleEvent.RESTORED)
    assert event.capsule.id == scope.capsule.id
    assert world.tick_number() == 2
    until(lambda: not scope.dirty, 'the answer is not heard')
    assert world.served.node.runner.phase == PolicyStatus.HOLD
    entered = scope.capsule.id
    ticker.until(lambda: scope.capsule.id != entered, 'the next save')   # no repair
    ticker.halt()
    world.no_capsules()
    assert len(world.restored()) == 2


def test_p25_a_halt_far_from_the_witness_stops_and_the_next_entry_repairs_first(world: World
                                                                                ) -> None:
    order: list[str] = []
    recover = Leaf('recover', then=lambda: order.append('recover'))
    child = Leaf('child', then=lambda: order.append('child'))
    goal = world.execute('goal', 0)
    scope = CapsuleScope('scope', Sequence('both', memory=True, children=[child, goal]),
                         world.client, recover=recover)
    ticker = Ticker(world.probe, scope)
    child.says = Status.SUCCESS
    quiet = len(world.robot.actions.messages)
    ticker.until(lambda: len(world.robot.actions.messages) > quiet, 'an action')
    world.move(AWAY)
    n, order[:] = len(world.robot.status.messages), []
    ticker.halt()
    world.robot.wait_phase('HOLD', start=n)
    refused = world.robot.events.wait(lambda m: m.kind == CapsuleEvent.REFUSED)
    assert refused.code == Code.ROBOT_MOVED
    assert scope.dirty
    repaired = scope.capsule.name
    ticker.until(lambda: order, 'recover')
    world.move(AT_HOME)
    recover.says = Status.SUCCESS
    ticker.until(lambda: 'child' in order, 'the child')
    assert order.index('child') == len(order) - 1
    assert set(order[:-1]) == {'recover'}
    ticker.halt()
    assert world.restored()[0] == repaired


def test_p25_a_child_that_fails_after_a_repair_fails_the_scope(world: World) -> None:
    """The repair is over then: the scope does not try its child again by itself."""
    child = Leaf('child')
    scope = CapsuleScope('scope', child, world.client)
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: child.ticks, 'the child')
    world.move(AWAY)
    ticker.halt()
    world.robot.events.wait(lambda m: m.kind == CapsuleEvent.REFUSED)
    world.move(AT_HOME)
    child.says = Status.FAILURE
    assert ticker.end() is Status.FAILURE
    assert (child.entered, scope.dirty) == (2, False)
    assert len(world.restored()) == 2


def test_p25_recover_that_fails_leaves_the_scope_dirty(world: World) -> None:
    recover, child = Leaf('recover', Status.FAILURE), Leaf('child', Status.FAILURE)
    scope = CapsuleScope('scope', child, world.client, recover=recover)
    ticker = Ticker(world.probe, Retry('retry', scope, 2))
    assert ticker.end() is Status.FAILURE
    assert (board('scope'), scope.dirty) == (Code.ROBOT_MOVED, True)
    assert 'recover' in board('scope', 'message')
    assert (child.ticks, recover.entered) == (1, 2)      # the second try did not reach the child
    recover.says = child.says = Status.SUCCESS
    assert ticker.end() is Status.SUCCESS
    assert len(world.restored()) == 1


def test_p25_somebody_else_has_rewound_so_the_state_is_left_alone(world: World) -> None:
    recover = Leaf('recover', Status.SUCCESS)
    child = Leaf('child')
    scope = CapsuleScope('scope', child, world.client, recover=recover)
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: child.ticks, 'the child')
    assert world.robot.call('reset').success             # a person
    child.says = Status.FAILURE
    assert ticker.end() is Status.FAILURE
    assert board('scope') == Code.STALE_EPOCH
    assert (recover.ticks, scope.dirty) == (0, False)
    world.no_capsules()
    assert world.restored() == []


def test_p25_a_rewind_by_its_own_child_does_not_make_the_scope_stale(world: World) -> None:
    child = Sequence('child', memory=True, children=[
        world.execute('some', 3), RestoreCapsule('fresh', world.client, 'origin'),
        ExecutePolicy('anew', world.client, capsule='origin', max_ticks=2),
        Leaf('no', Status.FAILURE)])
    scope = CapsuleScope('scope', child, world.client)
    assert Ticker(world.probe, scope).end() is Status.FAILURE
    assert board('scope') == Code.OK
    assert world.tick_number() == 2
    assert world.restored() == [scope.capsule.name]


def test_p25_a_halted_first_entry_leaves_no_capsule(world: World) -> None:
    child = Leaf('child')
    scope = CapsuleScope('scope', child, world.client)
    ticker = Ticker(world.probe, scope)
    assert ticker.once() is Status.RUNNING               # the save is on its way
    ticker.halt()
    world.robot.events.wait(lambda m: m.kind == CapsuleEvent.SAVED)
    world.no_capsules()
    assert (child.ticks, scope.dirty) == (0, False)
    assert world.restored() == []


def test_p12_nothing_is_published_between_a_scope_and_the_next_goal(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = world.probe.listen(ActionChunk, f'{world.served.name}/chunk')
    timer, periods = world.served.node.runner.timer, []
    monkeypatch.setattr(world.served.node.runner, 'timer',
                        lambda: (timer(), periods.append(len(world.robot.actions.messages))))
    halted = world.execute('halted', 0)
    scope = CapsuleScope('scope', Hasty(halted), world.client)
    ticker = Ticker(world.probe, scope)
    n = len(world.robot.actions.messages)
    ticker.until(lambda: len(world.robot.actions.messages) > n + 3, 'actions')
    scope.decorated.now = True
    assert ticker.end() is Status.FAILURE
    start = len(periods)
    until(lambda: len(periods) > start + 20, 'twenty periods')
    assert len(set(periods[start + 5:])) == 1                # all that was sent has arrived
    held = world.robot.actions.messages[-1].points[-1]
    assert list(held.positions) == world.robot.position      # on_stop was the last
    assert Ticker(world.probe, world.execute('after', 3)).end() is Status.SUCCESS
    first = next(c for c in chunks.messages if c.epoch > board('scope', 'epoch'))
    assert first.tick == 3                                   # of the restored state


def test_several_scopes_of_a_tree_keep_apart(world: World) -> None:
    good = CapsuleScope('good', world.execute('two', 2), world.client)
    bad = CapsuleScope('bad', Sequence('seq', memory=True, children=[
        world.execute('three', 3), Leaf('no', Status.FAILURE)]), world.client)
    root = Sequence('root', memory=True, children=[good, bad])
    ticker = Ticker(world.probe, root)
    for end in (4, 6):                                   # twice: nothing is left over
        assert ticker.end() is Status.FAILURE
        assert world.tick_number() == end
    world.no_capsules()


def test_a_child_may_take_longer_than_the_lease(world: World) -> None:
    now = [100.0]
    child = Leaf('child')
    scope = CapsuleScope('scope', child, world.client, lease_s=10.0, steady=lambda: now[0])
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: child.ticks, 'the child')
    now[0] += 6.0
    ticker.once()
    assert world.robot.events.wait(
        lambda m: m.kind == CapsuleEvent.KEPT).capsule.name == scope.capsule.name
    n = len(world.robot.events.messages)
    ticker.once()                                        # not at every tick
    assert world.robot.call('list_capsules').success
    assert len(world.robot.events.messages) == n


def test_a_scope_is_drawn_as_a_decorator_with_its_recovery(world: World) -> None:
    scope = CapsuleScope('scope', Leaf('child'), world.client, recover=Leaf('recover'))
    assert [line.split()[-1] for line in unicode_tree(scope).splitlines()] == [
        'scope', 'child', 'recover']
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: scope.stage is Stage.CHILD, 'the child')
    assert scope.tip() is scope.decorated
    with pytest.raises(TypeError):
        CapsuleScope('scope', None, world.client)
