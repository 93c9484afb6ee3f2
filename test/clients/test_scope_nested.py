"""Scopes inside scopes: the outer restore first, the inner one stale; and rewinds that were under
way when a scope was left (P25)."""
from __future__ import annotations

from typing import Any

from py_trees.common import Status
from py_trees.composites import Selector, Sequence

from flashrt_ros.clients.behaviours import RestoreCapsule
from flashrt_ros.clients.scope import CapsuleScope, Stage
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import CapsuleEvent
from test.clients.trees import Hasty, Leaf, Ticker, board
from test.clients.world import AT_HOME, AWAY, World
from test.node.harness import until


class Nested:
    """outer(sequence(a few ticks, inner(sequence(a few ticks, leaf))))."""

    def __init__(self, world: World, **more: Any) -> None:
        client = world.client
        self.leaf = Leaf('leaf')
        self.inner = CapsuleScope('inner', Sequence('in', memory=True, children=[
            world.execute('inside', 3), self.leaf]), client, **more.get('inner', {}))
        between = more.get('between', lambda scope: scope)
        self.outer = CapsuleScope('outer', Sequence('out', memory=True, children=[
            world.execute('outside', 4), between(self.inner)]), client, **more.get('outer', {}))
        self.ticker = Ticker(world.probe, self.outer)

    def reach_leaf(self) -> None:
        """Tick until the innermost leaf runs: outer saved at tick 2, inner at 6, now is 9."""
        n = self.leaf.ticks
        self.ticker.until(lambda: self.leaf.ticks > n, 'the leaf')


def test_p25_a_failure_inside_returns_through_both_each_once(world: World) -> None:
    tree = Nested(world)
    tree.reach_leaf()
    tree.leaf.says = Status.FAILURE
    assert tree.ticker.end() is Status.FAILURE
    assert world.tick_number() == 2
    assert [board(n) for n in ('inner', 'outer')] == [Code.OK, Code.OK]
    world.no_capsules()
    assert world.restored() == [tree.inner.capsule.name, tree.outer.capsule.name]


def test_p25_the_outer_goes_on_after_an_inner_failure_and_can_still_return(world: World) -> None:
    """The inner restore was this tree's own: it does not make the outer scope stale."""
    last = Leaf('last')
    tree = Nested(world, between=lambda inner: Selector('or', memory=True, children=[
        inner, Sequence('plan b', memory=True, children=[world.execute('other', 5), last])]))
    tree.reach_leaf()
    tree.leaf.says = Status.FAILURE
    tree.ticker.until(lambda: last.ticks, 'plan b')
    assert world.tick_number() == 6 + 5
    last.says = Status.FAILURE
    assert tree.ticker.end() is Status.FAILURE
    assert world.tick_number() == 2
    assert world.restored() == [tree.inner.capsule.name, tree.outer.capsule.name]


def test_p25_of_two_halted_scopes_the_outer_returns_and_the_inner_is_stale(world: World) -> None:
    tree = Nested(world)
    tree.reach_leaf()
    tree.ticker.halt()
    stale = world.robot.events.wait(lambda m: m.kind == CapsuleEvent.REFUSED)
    assert (stale.code, stale.capsule.name) == (Code.STALE_EPOCH, '')
    assert world.tick_number() == 2
    until(lambda: not tree.outer.dirty, 'the outer answer is not heard')
    first = tree.outer.capsule.name
    tree.reach_leaf()                                    # both go on as if nothing had been
    assert not tree.inner.dirty
    assert world.tick_number() == 9
    tree.ticker.halt()
    until(lambda: not tree.outer.dirty, 'the outer answer is not heard')
    assert world.restored() == [first, tree.outer.capsule.name]


def test_p25_halted_away_from_both_witnesses_the_outer_repairs_and_the_inner_does_not_move_it(
        world: World) -> None:
    recover = {n: Leaf(f'recover {n}') for n in ('outer', 'inner')}
    tree = Nested(world, outer={'recover': recover['outer']}, inner={'recover': recover['inner']})
    tree.reach_leaf()
    world.move(AWAY)
    tree.ticker.halt()
    until(lambda: [m.code for m in world.robot.events.messages
                   if m.kind == CapsuleEvent.REFUSED] == [Code.ROBOT_MOVED] * 2, 'two refusals')
    assert tree.outer.dirty
    assert tree.inner.dirty
    capsule = tree.outer.capsule.name
    tree.ticker.until(lambda: recover['outer'].ticks, 'recover')
    world.move(AT_HOME)
    recover['outer'].says = Status.SUCCESS
    tree.reach_leaf()
    assert world.tick_number() == 9
    assert recover['inner'].ticks == 0                   # its state was from before: stale
    tree.leaf.says = Status.SUCCESS
    assert tree.ticker.end() is Status.SUCCESS
    world.no_capsules()
    assert world.restored() == [capsule]


def test_p25_an_outer_failure_waits_for_the_restore_of_a_scope_that_was_halted_inside(
        world: World) -> None:
    """Halt of the inner and failure of the outer come in one tick: the inner restore is under way
    when the outer begins with its own, and must not make it stale."""
    tree = Nested(world, between=Hasty)
    tree.reach_leaf()
    tree.outer.decorated.children[1].now = True
    assert tree.ticker.end() is Status.FAILURE
    assert board('outer') == Code.OK
    assert world.tick_number() == 2
    world.no_capsules()
    assert world.restored() == [tree.inner.capsule.name, tree.outer.capsule.name]


def test_p25_a_restore_by_the_child_that_is_under_way_at_a_halt_is_repaired_at_the_next_entry(
        world: World) -> None:
    child = RestoreCapsule('fresh', world.client, 'origin')
    scope = CapsuleScope('scope', child, world.client)
    ticker = Ticker(world.probe, scope)
    ticker.until(lambda: scope._call is not None, 'the save')
    until(lambda: not scope._call.open, 'the save is not answered')
    with world.served.busy():
        ticker.until(lambda: child.status is Status.RUNNING, 'the child')
        ticker.halt()                                    # both requests are on their way
    world.robot.events.wait(lambda m: m.kind == CapsuleEvent.RESET)
    until(lambda: not child.rewinding, 'the child is not answered')
    assert scope.dirty
    saved = scope.capsule
    ticker.until(lambda: scope.stage is Stage.CHILD, 'the child again')
    assert scope.capsule.tick == 2                       # saved after the repair
    assert ticker.end() is Status.SUCCESS
    assert saved.name in world.restored()
