"""JointState merged by name over messages and publishers."""
from __future__ import annotations

import array
import itertools

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.spec import OutputSpec
from test.ingest.messages import T0, S, joints, observe, term

MS = 1_000_000
POSITION = term('joint_position', 'joint_states', joints=('hip', 'knee', 'grip'))


def test_p30_joints_are_merged_by_name_over_messages_in_any_order() -> None:
    messages = [joints(T0, {'knee': 2.0, 'hip': 1.0}), joints(T0, {'grip': 3.0, 'unused': 9.0})]
    for order in itertools.permutations(messages):
        b = observe(POSITION, size=3)
        for msg in order:
            b.get('joint_states', msg)
        assert not b.missing()
        assert b.step().tolist() == [1.0, 2.0, 3.0]


def test_p30_the_newer_stamp_wins_for_each_joint_whatever_arrives_last() -> None:
    b = observe(POSITION, size=3)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'knee': 2.0, 'grip': 3.0}))
    b.get('joint_states', joints(T0 + 20 * MS, {'hip': 10.0}))
    b.get('joint_states', joints(T0 + 10 * MS, {'hip': 5.0, 'knee': 20.0}))
    assert b.step().tolist() == [10.0, 20.0, 3.0]
    assert b.obs.counters['older'] == 1
    assert b.obs.joints() == {'hip': (10.0, T0 + 20 * MS), 'knee': (20.0, T0 + 10 * MS),
                              'grip': (3.0, T0)}


def test_p30_a_name_twice_refuses_the_message_and_names_the_joint() -> None:
    b = observe(POSITION, size=3)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'knee': 2.0, 'grip': 3.0}))
    for name in ('knee', 'unused'):
        with pytest.raises(Refusal, match=f'joint {name} stands twice') as refusal:
            b.get('joint_states', joints(T0 + 1, names=['hip', name, name],
                                         position=[7.0, 8.0, 9.0]))
        assert refusal.value.code is Code.INPUT_REJECTED
    assert b.step().tolist() == [1.0, 2.0, 3.0]      # nothing of it came in


@pytest.mark.parametrize(('columns', 'named'), [
    ({'position': [1.0, 2.0]}, 'joint grip has no position'),
    ({'position': [1.0, 2.0, 3.0], 'velocity': [1.0]}, 'joint knee has no velocity'),
    ({'position': [1.0, 2.0, 3.0, 4.0]}, 'last joint is grip'),
    ({'position': [1.0, 2.0, 3.0], 'effort': [0.0] * 4}, '4 values of effort')])
def test_p30_unequal_lengths_refuse_the_message_and_name_the_joint(
        columns: dict[str, list[float]], named: str) -> None:
    b = observe(POSITION, size=3)
    with pytest.raises(Refusal, match=named) as refusal:
        b.get('joint_states', joints(T0, names=['hip', 'knee', 'grip'], **columns))
    assert refusal.value.code is Code.INPUT_REJECTED
    assert b.obs.joints() == {}


def test_p30_a_joint_never_seen_stops_and_is_named_and_never_zero() -> None:
    b = observe(POSITION, size=3)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'grip': 3.0}))
    assert b.missing() == ['joint_position (joint_states): joint knee never received']
    before = b.save()
    with pytest.raises(Refusal, match='knee') as refusal:
        b.step()
    assert refusal.value.code is Code.INPUT_STALE
    assert all((before[n] == b.host[n]).all() for n in before)


def test_p30_a_joint_older_than_its_limit_is_named_with_its_age() -> None:
    b = observe(term('joint_position', 'joint_states', joints=('hip', 'knee'), max_age_s=0.1),
                size=2)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'knee': 2.0}))
    b.now = T0 + 300 * MS
    b.get('joint_states', joints(b.now, {'hip': 1.5}))
    [missing] = b.obs.missing(b.now)
    assert (missing.term, missing.topic, missing.limit_s) == ('joint_position', 'joint_states', 0.1)
    assert missing.age_s == pytest.approx(0.3)
    assert 'joint knee 0.300 s old' in missing.why


def test_p30_an_empty_velocity_is_fine_unless_a_term_uses_it() -> None:
    b = observe(POSITION, size=3)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'knee': 2.0, 'grip': 3.0}))
    assert not b.missing()

    b = observe(POSITION, term('joint_velocity', 'joint_states', joints=('hip',)), size=4)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'knee': 2.0, 'grip': 3.0}))
    assert b.missing() == ['joint_velocity (joint_states): joint hip never received']
    b.get('joint_states', joints(T0, names=['hip'], position=[1.0], velocity=[0.5]))
    assert b.step().tolist() == [1.0, 2.0, 3.0, 0.5]


def test_joint_effort_and_every_container_that_messages_come_in() -> None:
    for kind in (list, tuple, np.array, lambda v: array.array('d', v)):
        b = observe(term('joint_effort', 'joint_states', joints=('b', 'a')), size=2)
        b.get('joint_states', joints(T0, names=['a', 'b'], position=kind([1.0, 2.0]),
                                     velocity=kind([]), effort=kind([5.0, 6.0])))
        assert b.step().tolist() == [6.0, 5.0]


def test_p29_nan_in_a_used_joint_stops_in_an_unused_one_does_not() -> None:
    nan = float('nan')
    b = observe(term('joint_position', 'joint_states', joints=('hip',)), size=1)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'other': nan}))
    assert not b.missing()
    b.get('joint_states', joints(T0 + 1, {'hip': nan}))
    assert b.missing() == ['joint_position (joint_states): hip is nan']
    with pytest.raises(Refusal, match='hip is nan'):
        b.step()
    assert b.obs.joints() == {}                        # nothing that could be held


def test_after_a_silence_an_older_stamp_is_a_source_that_started_anew() -> None:
    b = observe(term('joint_position', 'joint_states', joints=('hip',)), size=1)
    b.get('joint_states', joints(50 * S, {'hip': 1.0}))      # counts from its own start
    b.now += 100 * MS
    b.get('joint_states', joints(2 * S, {'hip': 2.0}))
    assert b.step().tolist() == [1.0]
    b.now += 2 * S
    b.get('joint_states', joints(4 * S, {'hip': 3.0}))
    assert b.step().tolist() == [3.0]


def test_latch_record_holds_every_merged_message_oldest_first() -> None:
    b = observe(POSITION, size=3)
    asked = []

    def digest(n: int) -> int:
        asked.append(n)
        return n
    for n, values in enumerate([{'hip': 1.0}, {'knee': 2.0}, {'none': 0.0}, {'grip': 3.0}]):
        b.get('joint_states', joints(T0 + n, values), digest=lambda n=n: digest(n))
    b.step()
    assert [(e.name, e.stamp_ns, e.step) for e in b.entries] == [
        ('joint_states', T0, 0), ('joint_states', T0 + 1, 0), ('joint_states', T0 + 3, 0)]
    assert asked == []                                  # digests are made when asked for
    assert [e.digest for e in b.entries] == [0, 1, 3] == [e.digest for e in b.entries]
    assert asked == [0, 1, 3]
    b.step()
    assert b.entries == []


def test_the_record_stays_small_while_nobody_latches() -> None:
    b = observe(POSITION, size=3)
    b.get('joint_states', joints(T0, {'grip': 3.0}))
    for n in range(1, 1000):
        b.get('joint_states', joints(T0 + n, {'hip': 1.0, 'knee': float(n)}))
    b.step()
    stamps = [e.stamp_ns for e in b.entries]
    assert len(stamps) <= 65
    assert stamps[0] == T0                              # grip still stems from it
    assert stamps[-1] == T0 + 999


def test_joints_of_outputs_are_measured_though_no_term_reads_them() -> None:
    output = OutputSpec('arm', 'outputs.arm', 'arm/cmd', 'sensor_msgs/msg/JointState', 'position',
                        joints=('hip', 'wrist'), port='actions')
    b = observe(term('joint_position', 'joint_states', joints=('hip',)), size=1,
                outputs={'arm': output})
    b.get('joint_states', joints(T0, {'hip': 1.0}))
    assert not b.missing()                              # wrist is not used by a term
    b.get('joint_states', joints(T0, {'wrist': 4.0}))
    assert b.obs.joints() == {'hip': (1.0, T0), 'wrist': (4.0, T0)}

    b = observe(term('constant', value=(1.0,)), size=1, outputs={'arm': output},
                joint_states='state/joints')
    assert [t.topic for t in b.obs.topics()] == ['state/joints']
    b.get('state/joints', joints(T0, {'wrist': 4.0}))
    assert b.obs.joints() == {'wrist': (4.0, T0)}


def test_joints_over_two_topics_keep_the_newest() -> None:
    output = OutputSpec('arm', 'outputs.arm', 'arm/cmd', 'sensor_msgs/msg/JointState', 'position',
                        joints=('hip', 'grip'), port='actions')
    b = observe(term('joint_position', 'arm', joints=('hip',)),
                term('joint_position', 'gripper', joints=('grip',)), size=2,
                outputs={'arm': output})
    b.get('arm', joints(T0, {'hip': 1.0, 'grip': -1.0}))
    b.get('gripper', joints(T0 + 5, {'grip': 2.0}))
    assert b.step().tolist() == [1.0, 2.0]
    assert b.obs.joints() == {'hip': (1.0, T0), 'grip': (2.0, T0 + 5)}
    b.get('arm', joints(T0 + 9, {'grip': -2.0}))
    assert b.obs.joints()['grip'] == (-2.0, T0 + 9)
    assert b.step().tolist() == [1.0, 2.0]              # a term reads its own topic
