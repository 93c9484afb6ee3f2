"""Lock step: which messages make a step, whatever the order in which topics arrive."""
from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.inbox import Arrival, LockStep
from flashrt_ros.ingest.spec import RunSpec
from test.ingest.messages import T0, Bound, imu, joints, observe, term, twist

TOPICS = ('imu', 'joint_states', 'cmd_vel')
Message = tuple[str, int]


def steps(interleaving: Sequence[tuple[str, int, int]], depth: int = 100
          ) -> tuple[list[list[Message]], int]:
    """Return the steps that `(topic, stamp, number)` give, and how many were overtaken."""
    lock = LockStep(TOPICS, depth)
    found = []
    for topic, stamp, number in interleaving:
        lock.put(topic, stamp, number)
        while lock.ready():
            found.append(lock.take())
    return found, lock.overtaken


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Two orders of the same messages, the order within each topic kept; some are lost."""
    queues = {topic: [(topic, 0 if topic == 'cmd_vel' else 20 * n, n)
                      for n in range(1, 8) if draw(st.integers(0, 5))] for topic in TOPICS}
    orders = []
    for _ in range(2):
        left = {topic: list(queue) for topic, queue in queues.items()}
        order = []
        while any(left.values()):
            topic = draw(st.sampled_from([t for t in TOPICS if left[t]]))
            order.append(left[topic].pop(0))
        orders.append(order)
    return orders[0], orders[1]


@settings(deadline=None)
@given(interleaved())
def test_any_interleaving_of_topics_gives_the_same_steps(
        orders: tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]) -> None:
    first, second = orders
    assert steps(first) == steps(second)


def test_a_step_takes_one_message_of_each_topic_with_equal_stamps() -> None:
    found, overtaken = steps([('imu', 20, 1), ('cmd_vel', 0, 1), ('imu', 40, 2),
                              ('joint_states', 20, 1), ('joint_states', 40, 2),
                              ('cmd_vel', 0, 2)])
    assert found == [[('imu', n), ('joint_states', n), ('cmd_vel', n)] for n in (1, 2)]
    assert overtaken == 0


def test_a_message_that_another_topic_has_passed_is_overtaken_and_told() -> None:
    lock = LockStep(TOPICS)
    lock.put('imu', 20, 'a')
    lock.put('joint_states', 40, 'b')
    assert lock.overtaken == 1
    [problem] = lock.problems()
    assert 'imu (stamp 20 ns) was overtaken' in problem
    assert lock.problems() == []
    lock.put('imu', 40, 'c')
    lock.put('cmd_vel', 0, 'd')
    assert lock.take() == [('imu', 'c'), ('joint_states', 'b'), ('cmd_vel', 'd')]


def test_more_than_the_depth_is_overtaken() -> None:
    lock = LockStep(TOPICS)
    for n in range(11):
        lock.put('imu', 20 + n, n)
    assert lock.overtaken == 1
    assert '10 messages wait' in lock.problems()[0]


def test_losses_are_found_by_the_publication_sequence_number() -> None:
    lock = LockStep(TOPICS)
    for number in (5, 6, 8, 9, 1, 2, None, 3):           # 7 is lost; 1: a publisher anew
        lock.note('imu', number)
    assert lock.lost == 1
    assert 'imu lost 1 message before number 8' in lock.problems()[0]
    lock.note('imu', 7)
    assert lock.lost == 4


def lock_stepped() -> Bound:
    return observe(term('angular_velocity', 'imu', max_age_s=0.1),
                   term('joint_position', 'joint_states', joints=('a',)),
                   term('twist', 'cmd_vel', fields=('linear.x',)),
                   term('counter'), size=6, run=RunSpec(trigger=TOPICS))


def test_steps_use_their_own_messages_though_later_ones_have_arrived() -> None:
    b = lock_stepped()
    for n in (1, 2, 3):
        b.get('imu', imu(T0 + n, (float(n), 0.0, 0.0)))
    for n in (1, 2, 3):
        b.get('cmd_vel', twist(float(n)), at=T0 + 50)
    assert not b.obs.lockstep_ready()
    assert not b.obs.take()
    for n in (1, 2):
        b.get('joint_states', joints(T0 + n, {'a': float(n)}))
    for n in (1, 2):
        assert b.obs.lockstep_ready()
        assert b.obs.take()
        assert b.missing() == []
        assert b.step().tolist() == [n, 0, 0, n, n, n]
        assert b.obs.stamp_ns in (T0 + n, T0 + 50)
        assert {e.name: e.stamp_ns for e in b.entries} == {
            'imu': T0 + n, 'joint_states': T0 + n, 'cmd_vel': T0 + 50}
    assert not b.obs.lockstep_ready()
    assert b.obs.lockstep_problems() == []


def test_trigger_topics_have_no_age_limit_and_are_subscribed_reliable() -> None:
    b = lock_stepped()
    b.get('imu', imu(T0))
    b.get('joint_states', joints(T0, {'a': 1.0}))
    b.get('cmd_vel', twist())
    b.obs.take()
    b.now += 3600 * 1_000_000_000
    assert b.missing() == []
    assert {(t.reliable, t.depth, t.trigger) for t in b.obs.topics()} == {(True, 10, True)}


def test_in_hold_a_step_can_be_taken_and_left_unused() -> None:
    b = lock_stepped()
    for n in range(1, 30):
        b.get('imu', imu(T0 + n))
        b.get('joint_states', joints(T0 + n, {'a': float(n)}))
        b.get('cmd_vel', twist())
        assert b.obs.take()
    assert b.obs.lockstep_problems() == []
    assert b.obs.joints()['a'] == (29.0, T0 + 29)
    assert b.step().tolist() == [0, 0, 0, 29, 0, 1]


def test_a_stamp_that_goes_back_still_makes_a_step() -> None:
    b = lock_stepped()
    for n in (50, 7):                                    # the simulation starts anew
        b.get('imu', imu(T0 + n, (float(n), 0.0, 0.0)))
        b.get('joint_states', joints(T0 + n, {'a': float(n)}))
        b.get('cmd_vel', twist())
        b.obs.take()
        assert b.step()[[0, 3]].tolist() == [n, n]


def test_lost_messages_and_refused_ones_are_told_apart() -> None:
    b = lock_stepped()
    b.get('imu', imu(T0), seq=1)
    with pytest.raises(Refusal) as refusal:
        b.get('imu', twist(), seq=2)
    assert refusal.value.code is Code.INPUT_REJECTED
    b.get('imu', imu(T0 + 1), seq=3)
    assert b.obs.counters['lost'] == 0
    b.get('imu', imu(T0 + 2), seq=5)
    assert b.obs.counters['lost'] == 1


def test_a_clock_jump_empties_the_waiting_messages() -> None:
    b = lock_stepped()
    b.get('imu', imu(T0))
    b.obs.receive('joint_states', joints(5, {'a': 1.0}), Arrival(5, 1))
    b.obs.receive('cmd_vel', twist(), Arrival(5, 1))
    assert not b.obs.lockstep_ready()
    b.obs.receive('imu', imu(5), Arrival(5, 1))
    assert b.obs.lockstep_ready()
    assert b.obs.lockstep_problems() == []


def test_a_trigger_that_no_term_reads_is_refused() -> None:
    with pytest.raises(Refusal, match='no term reads the topic clock'):
        observe(term('angular_velocity', 'imu'), size=3, run=RunSpec(trigger=('imu', 'clock')))
