"""A policy node that is absent, dies in mid-call, or answers late or never: every behaviour ends,
by a steady clock, and no rewind has a second effect (P18, P25, P28, P40)."""
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from py_trees.common import Status
from py_trees.composites import Sequence
import pytest
from rclpy.task import Future

from flashrt_ros.clients.behaviours import (
    ExecutePolicy,
    RestoreCapsule,
    Rollback,
    SaveCapsule,
    Stop,
)
from flashrt_ros.clients.calls import Call
from flashrt_ros.clients.client import PolicyClient
from flashrt_ros.clients.scope import CapsuleScope, Stage
from flashrt_ros.core.errors import Code
from flashrt_ros.srv import SaveCapsule as SaveCapsuleService
from test.clients.fake_node import SESSION, FakeNode
from test.clients.trees import Leaf, Ticker, board
from test.node.harness import Probe, until

TIMEOUT_S = 5.0


class Clock:
    """Steady time, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fake() -> Iterator[FakeNode]:
    made = FakeNode()
    yield made
    made.close()


def ready(probe: Probe, fake: FakeNode) -> PolicyClient:
    """Return a client that has heard of the node's session."""
    client = probe.client(fake.name)
    fake.say_status(SESSION)
    until(lambda: client.session == SESSION, 'no status')
    return client


MAKE: dict[str, Any] = {
    'save_capsule': SaveCapsule, 'restore_capsule': RestoreCapsule, 'rollback': Rollback,
    'stop': Stop, 'goal': ExecutePolicy}


@pytest.mark.parametrize('what', MAKE)
def test_a_service_that_is_absent_is_failure_at_once(probe: Probe, what: str) -> None:
    client = probe.inside(lambda: PolicyClient(probe.node, '/no/such'))
    assert Ticker(probe, MAKE[what]('x', client)).once() is Status.FAILURE
    assert board('x') == Code.UNSUPPORTED
    assert '/no/such' in board('x', 'message')


@pytest.mark.parametrize('what', MAKE)
def test_a_node_that_never_answers_is_failure_after_the_time_out(
        probe: Probe, fake: FakeNode, clock: Clock, what: str) -> None:
    client = ready(probe, fake)
    fake.held.add(what)
    ticker = Ticker(probe, MAKE[what]('x', client, timeout_s=TIMEOUT_S, steady=clock))
    assert ticker.once() is Status.RUNNING
    fake.wait(what)
    clock.now += TIMEOUT_S - 0.1
    assert ticker.once() is Status.RUNNING
    clock.now += 0.2
    assert ticker.once() is Status.FAILURE
    assert board('x') == Code.IO
    fake.release(what)                                   # the late answer harms nobody
    assert ticker.end() is Status.SUCCESS


def test_a_node_that_dies_in_mid_call_is_failure_and_the_next_call_works(
        probe: Probe, fake: FakeNode, clock: Clock) -> None:
    client = ready(probe, fake)
    fake.held.add('save_capsule')
    ticker = Ticker(probe, SaveCapsule('x', client, steady=clock))
    assert ticker.once() is Status.RUNNING
    fake.wait('save_capsule')
    fake.vanish()
    assert ticker.once() is Status.RUNNING
    clock.now += TIMEOUT_S + 1
    assert ticker.once() is Status.FAILURE
    assert board('x') == Code.IO
    until(lambda: not client.service_ready('save_capsule'), 'the dead node is still seen')
    assert ticker.once() is Status.FAILURE
    assert board('x') == Code.UNSUPPORTED


def test_a_node_that_goes_away_ends_its_goal(probe: Probe, fake: FakeNode, clock: Clock) -> None:
    client = ready(probe, fake)
    fake.held.add('result')
    goal = ExecutePolicy('x', client, steady=clock)
    ticker = Ticker(probe, goal)
    ticker.until(lambda: fake.count('result') and goal._execution.accepted.done(), 'the goal')
    clock.now += 3 * TIMEOUT_S                           # longer than an acknowledgement may take
    assert ticker.once() is Status.RUNNING
    fake.vanish()
    until(lambda: not client.execute_ready(), 'the dead node is still seen')
    assert ticker.once() is Status.RUNNING               # perhaps only discovery stutters
    clock.now += TIMEOUT_S + 1
    assert ticker.once() is Status.FAILURE
    assert 'went away' in board('x', 'message')


def test_a_node_that_was_configured_anew_has_lost_its_goal(probe: Probe, fake: FakeNode) -> None:
    client = ready(probe, fake)
    fake.held.add('result')
    ticker = Ticker(probe, ExecutePolicy('x', client))
    ticker.until(lambda: fake.count('result'), 'the goal')
    fake.epoch = 1
    fake.say_status(SESSION + 1)
    assert ticker.end() is Status.FAILURE
    assert board('x') == Code.IO
    assert client.epoch == 1                             # epochs begin anew


def test_a_goal_whose_result_is_lost_ends_after_its_limit(probe: Probe, fake: FakeNode,
                                                          clock: Clock) -> None:
    client = ready(probe, fake)
    fake.held.add('result')
    goal = ExecutePolicy('x', client, max_duration_s=30.0, steady=clock)
    ticker = Ticker(probe, goal)
    ticker.until(lambda: fake.count('result') and goal._execution.accepted.done(), 'the goal')
    clock.now += 30.0
    assert ticker.once() is Status.RUNNING
    clock.now += TIMEOUT_S + 1
    assert ticker.once() is Status.FAILURE
    fake.wait('cancel')


def test_p40_a_goal_halted_before_its_acknowledgement_is_cancelled_when_that_comes(
        probe: Probe, fake: FakeNode) -> None:
    client = ready(probe, fake)
    fake.held |= {'goal', 'result'}
    goal = ExecutePolicy('x', client)
    ticker = Ticker(probe, goal)
    assert ticker.once() is Status.RUNNING
    fake.wait('goal')
    ticker.halt()                                        # does not wait for the acknowledgement
    assert goal.status is Status.INVALID
    assert fake.count('cancel') == 0
    fake.release('goal')
    fake.wait('cancel')
    fake.release('result')
    assert ticker.end() is Status.SUCCESS                # and the next goal is another one
    assert fake.count('goal') == 2


def test_p28_a_rewind_carries_the_epoch_that_the_one_before_it_was_answered(
        probe: Probe, fake: FakeNode) -> None:
    """Both in one tick, and no status in between: so that only a late one is stale."""
    client = ready(probe, fake)
    root = Sequence('root', memory=True, children=[
        RestoreCapsule(name, client, name) for name in ('a', 'b', 'c')])
    assert Ticker(probe, root).end() is Status.SUCCESS
    assert [fake.wait('restore_capsule', n).if_epoch for n in (1, 2, 3)] == [1, 2, 3]
    given = RestoreCapsule('given', client, 'a', if_epoch=0)
    assert Ticker(probe, given).end() is Status.SUCCESS
    assert fake.wait('restore_capsule', 4).if_epoch == 0


def test_p28_a_goal_carries_the_newest_epoch_unless_told_otherwise(probe: Probe, fake: FakeNode
                                                                   ) -> None:
    client = ready(probe, fake)
    for n, (given, carried) in enumerate((({}, 1), ({'if_epoch': 0}, 0), ({'if_epoch': 7}, 7)), 1):
        assert Ticker(probe, ExecutePolicy('x', client, **given)).end() is Status.SUCCESS
        assert fake.wait('goal', n).if_epoch == carried


def test_an_answer_is_heard_before_the_tick_that_sees_it_goes_on(probe: Probe) -> None:
    """rclpy runs done callbacks as tasks, later than a tick may look."""
    heard: list[Any] = []
    answer = SaveCapsuleService.Response(success=True, epoch=5)

    def look() -> None:
        future = Future(executor=probe._executor)
        client: Any = SimpleNamespace(
            target='x', service_ready=lambda _: True, call=lambda *_: future,
            hear=lambda said: heard.append(('client', said.epoch)))
        call = Call(client, 'save_capsule', heard=lambda said: heard.append(('scope', said.epoch)))
        assert call.poll() is None
        future.set_result(answer)
        assert call.poll() is answer
        assert heard == [('client', 5), ('scope', 5)]
    probe.inside(look)
    probe.inside(lambda: None)
    assert heard.count(('scope', 5)) == 1                # and once only


# -- scopes


def scope_at_child(probe: Probe, fake: FakeNode, clock: Clock, **more: Any
                   ) -> tuple[CapsuleScope, Leaf, Ticker]:
    child = Leaf('child')
    scope = CapsuleScope('scope', child, ready(probe, fake), steady=clock, **more)
    ticker = Ticker(probe, scope)
    ticker.until(lambda: child.ticks, 'the child')
    return scope, child, ticker


def test_a_scope_whose_node_is_absent_fails_without_its_child(probe: Probe) -> None:
    client = probe.inside(lambda: PolicyClient(probe.node, '/no/such'))
    child = Leaf('child')
    scope = CapsuleScope('scope', child, client)
    assert Ticker(probe, scope).once() is Status.FAILURE
    assert (board('scope'), child.ticks, scope.dirty) == (Code.UNSUPPORTED, 0, False)


def test_a_save_that_is_answered_after_the_scope_gave_up_is_dropped(
        probe: Probe, fake: FakeNode, clock: Clock) -> None:
    fake.held.add('save_capsule')
    child = Leaf('child')
    ticker = Ticker(probe, CapsuleScope('scope', child, ready(probe, fake), steady=clock))
    assert ticker.once() is Status.RUNNING
    name = fake.wait('save_capsule').name
    clock.now += TIMEOUT_S + 1
    assert ticker.once() is Status.FAILURE
    assert board('scope') == Code.IO
    fake.release('save_capsule')
    dropped = fake.wait('drop_capsule')
    assert (dropped.name, dropped.if_id, child.ticks) == (name, 'id1', 0)


def test_p25_a_halt_whose_answer_is_not_seen_restores_once(probe: Probe, fake: FakeNode,
                                                           clock: Clock) -> None:
    """The node carries the request out but the answer comes after the next entry has begun: the
    scope waits for it, and does not ask again."""
    scope, child, ticker = scope_at_child(probe, fake, clock)
    fake.held.add('restore_capsule')
    ticker.halt()
    fake.wait('stop')
    first = fake.wait('restore_capsule')
    assert (first.name, first.if_id, first.if_epoch) == (scope.capsule.name, 'id1', 1)
    assert scope.dirty
    ticks = child.ticks
    for _ in range(3):
        assert ticker.once() is Status.RUNNING
    fake.wait('stop', 2)
    fake.release('restore_capsule')
    ticker.until(lambda: child.ticks > ticks, 'the child')
    assert fake.count('restore_capsule') == 1
    assert fake.wait('drop_capsule').if_id == 'id1'
    assert scope.capsule.id == 'id2'


def test_p25_a_halt_whose_answer_never_comes_is_asked_again_with_the_same_condition(
        probe: Probe, fake: FakeNode, clock: Clock) -> None:
    """So that the node can tell that it has done it already (STALE_EPOCH)."""
    scope, child, ticker = scope_at_child(probe, fake, clock)
    fake.held.add('restore_capsule')
    ticker.halt()
    fake.wait('restore_capsule')
    ticks = child.ticks
    clock.now += TIMEOUT_S - 1
    assert ticker.once() is Status.RUNNING
    until(lambda: not scope._call.open, 'stop is not answered')
    fake.held.clear()
    fake.refuses['restore_capsule'] = Code.STALE_EPOCH
    clock.now += 2                                       # too late for the halt's request
    ticker.until(lambda: child.ticks > ticks, 'the child')
    assert fake.count('restore_capsule') == 2
    again = fake.wait('restore_capsule', 2)
    assert (again.if_id, again.if_epoch) == ('id1', 1)
    assert not scope.dirty


@pytest.mark.parametrize('code', [Code.EVICTED, Code.NOT_FOUND, Code.TOO_OLD, Code.FAULT])
def test_p25_a_capsule_that_cannot_come_back_keeps_the_scope_shut_until_somebody_rewinds(
        probe: Probe, fake: FakeNode, clock: Clock, code: Code) -> None:
    recover = Leaf('recover', Status.SUCCESS)
    scope, child, ticker = scope_at_child(probe, fake, clock, recover=recover)
    fake.refuses['restore_capsule'] = code
    child.says = Status.FAILURE
    ticks = child.ticks + 1
    for _ in range(2):
        assert ticker.end() is Status.FAILURE
        assert board('scope') == code
    assert (child.ticks, recover.ticks, scope.dirty) == (ticks, 0, True)
    fake.refuses['restore_capsule'] = Code.STALE_EPOCH   # after a reset by hand
    child.says = Status.SUCCESS
    assert ticker.end() is Status.SUCCESS
    assert child.ticks == ticks + 1


def test_p25_another_configure_makes_the_state_another_one(probe: Probe, fake: FakeNode,
                                                           clock: Clock) -> None:
    scope, child, ticker = scope_at_child(probe, fake, clock)
    fake.refuses['restore_capsule'] = Code.NOT_FOUND
    ticker.halt()
    fake.wait('restore_capsule')
    fake.say_status(SESSION + 1)
    until(lambda: scope.client.session == SESSION + 1, 'no status')
    assert scope.dirty
    child.says = Status.SUCCESS
    assert ticker.end() is Status.SUCCESS


def test_p25_a_node_that_dies_during_the_restore_leaves_the_scope_dirty(
        probe: Probe, fake: FakeNode, clock: Clock) -> None:
    scope, child, ticker = scope_at_child(probe, fake, clock)
    fake.held.add('restore_capsule')
    child.says = Status.FAILURE
    ticker.until(lambda: scope.stage is Stage.RESTORE, 'the restore')
    fake.wait('restore_capsule')
    fake.vanish()
    clock.now += TIMEOUT_S + 1
    assert ticker.once() is Status.FAILURE
    assert (board('scope'), scope.dirty) == (Code.IO, True)
    until(lambda: not scope.client.service_ready('stop'), 'the dead node is still seen')
    ticks = child.ticks
    assert ticker.once() is Status.FAILURE
    assert (board('scope'), child.ticks) == (Code.UNSUPPORTED, ticks)
    ticker.halt()                                        # and a halt raises nothing


def test_p25_a_restore_answered_after_the_time_out_counts(probe: Probe, fake: FakeNode,
                                                          clock: Clock) -> None:
    scope, child, ticker = scope_at_child(probe, fake, clock)
    fake.held.add('restore_capsule')
    child.says = Status.FAILURE
    ticker.until(lambda: scope.stage is Stage.RESTORE, 'the restore')
    fake.wait('restore_capsule')
    clock.now += TIMEOUT_S + 1
    assert ticker.once() is Status.FAILURE
    fake.release('restore_capsule')
    until(lambda: not scope.dirty, 'the answer is not heard')
    child.says = Status.SUCCESS
    assert ticker.end() is Status.SUCCESS
    assert fake.count('restore_capsule') == 1
