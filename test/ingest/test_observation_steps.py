"""What a step latches and advances, what a restore brings back, prompt, prefix, witness."""
from __future__ import annotations

import math

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.spec import GuardSpec, WitnessLimit
from test.ingest.messages import T0, S, array, imu, joints, observe, term, twist

MS = 1_000_000
RATE = term('angular_velocity', 'imu/data')
COMMAND = term('twist', 'cmd_vel', fields=('linear.x',), latched=True, timeout_s=0.5)


# --- what a step advances

def test_the_value_is_raw_plus_offset_times_scale() -> None:
    b = observe(term('array', 'a', length=2, offset=(1.0, -1.0), scale=(2.0, 0.5)), size=2)
    b.get('a', array(3.0, 3.0))
    assert b.step().tolist() == [8.0, 1.0]


def test_minus_zero_stays_minus_zero() -> None:
    b = observe(term('array', 'a', length=2, offset=(0.0, 0.0)), size=2)
    b.get('a', array(-0.0, 0.0))
    assert np.signbit(b.step()).tolist() == [True, False]


def test_phase_counter_and_episode_start_advance_once_per_step_the_first_counts_1() -> None:
    b = observe(term('phase', period_s=0.8), term('counter'), term('episode_start'), size=4)
    origin = b.save()
    first = b.step()
    assert first.tolist() == pytest.approx([math.sin(math.pi / 20), math.cos(math.pi / 20), 1, 1])
    assert b.read().tolist() == first.tolist()         # reading twice advances nothing
    b.step()
    assert b.step().tolist() == pytest.approx([math.sin(3 * math.pi / 20),
                                               math.cos(3 * math.pi / 20), 3, 0])
    b.restore(origin)
    assert b.step().tolist() == first.tolist()


def test_last_action_is_the_raw_row_of_the_step_before() -> None:
    b = observe(term('last_action', scale=2.0), size=2)
    assert b.step().tolist() == [0.0, 0.0]
    b.obs.set_last_action({'actions': np.array([0.1, 0.2], np.float32)})
    assert b.step().tolist() == [np.float32(0.1) * 2, np.float32(0.2) * 2]
    b = observe(term('last_action'), size=2, actions=5, output={'columns': (1, 3)})
    assert b.host['obs.last_action.actions'].shape == (2,)


def test_history_in_both_orders_is_padded_by_repetition() -> None:
    part = term('array', 'a', length=1, scale=10.0)
    for order, expected in (('newest_first', [[10] * 3, [20, 10, 10], [30, 20, 10], [40, 30, 20]]),
                            ('oldest_first', [[10] * 3, [10, 10, 20], [10, 20, 30], [20, 30, 40]])):
        b = observe(term('history', of=(part,), length=3, order=order), size=3)
        got = []
        for i in range(1, 5):
            b.get('a', array(float(i)))
            got.append(b.step().tolist())
        assert got == expected


def test_history_takes_one_row_per_step_of_all_its_terms_beside_others() -> None:
    b = observe(term('counter'),
                term('history', of=(term('array', 'a', length=2), term('last_action')), length=2),
                term('array', 'a', length=2), size=1 + 2 * 4 + 2)
    for i in range(2):
        for _ in range(3):                              # several messages within one step
            b.get('a', array(float(i), 0.5))
        value = b.step()
        b.obs.set_last_action({'actions': np.array([7.0, 8.0])})
    assert value.tolist() == [2, 1, .5, 7, 8, 0, .5, 0, 0, 1, .5]
    assert b.host['obs.obs.1.history'].shape == (2, 4)
    assert b.host['obs.obs.1.history'].dtype == np.float32


def test_p6_a_restore_brings_back_all_that_counts_steps() -> None:
    def make() -> object:
        return observe(term('history', of=(term('array', 'a', length=1),), length=4),
                       term('phase', period_s=0.14), term('last_action'), term('counter'),
                       term('episode_start'), size=10)

    def run(b: object, start: int, n: int) -> list[list[float]]:
        rows = []
        for i in range(start, start + n):
            b.get('a', array(math.sin(i)))
            rows.append(b.step().tolist())
            b.obs.set_last_action({'actions': np.array([i, -i], np.float32)})
        return rows
    b = make()
    run(b, 0, 5)
    saved = b.save()
    expected = run(b, 5, 6)
    run(b, 100, 3)
    b.restore(saved)
    assert run(b, 5, 6) == expected
    other = make()                                      # nothing hides in the object
    other.restore(saved)
    assert run(other, 5, 6) == expected
    for name in saved:                                  # and every buffer is load-bearing
        b.restore({**saved, name: np.zeros_like(saved[name])})
        assert run(b, 5, 1) != expected[:1], name


def test_latch_record_holds_only_the_newest_of_a_level_input() -> None:
    b = observe(RATE, COMMAND, size=4)
    for n in range(3):
        b.get('imu/data', imu(T0 + n))
    b.get('cmd_vel', twist(), at=T0 + 7)
    b.get('imu/data', imu(T0 + 3))
    b.step()
    assert [(e.name, e.stamp_ns, e.step) for e in b.entries] == [
        ('cmd_vel', T0 + 7, 0), ('imu/data', T0 + 3, 0)]
    b.step()
    assert b.entries == []
    b.get('imu/data', imu(T0 + 4))
    b.step()
    assert [(e.name, e.step) for e in b.entries] == [('imu/data', 2)]
    b.get('imu/data', imu(T0 + 5))
    assert [e.step for e in b.obs.latch(b.now, step=77)] == [77]


def test_the_stamp_is_the_newest_of_what_was_latched_keeping_inputs_apart() -> None:
    b = observe(RATE, term('joint_position', 'joint_states', joints=('a',)), COMMAND, size=5)
    b.get('imu/data', imu(T0 - 3))
    b.get('joint_states', joints(T0 - 5, {'a': 0.0}))
    b.get('cmd_vel', twist())
    b.step()
    assert b.obs.stamp_ns == T0 - 3
    b = observe(term('counter'), size=1)
    b.step()
    assert b.obs.stamp_ns == b.now
    b = observe(RATE, size=3)
    b.get('imu/data', imu(12 * S))                      # another clock
    b.step()
    assert b.obs.stamp_ns == T0


# --- prompt, prefix

def test_p6_p44_a_prompt_is_state_and_a_restore_brings_the_old_one_back() -> None:
    b = observe(term('prompt', encode='bytes', length=8), size=8, dtype='I64')
    assert b.obs.takes_prompt
    assert b.step().tolist() == [0] * 8
    b.obs.set_prompt('apfel')
    saved = b.save()
    assert b.step().tolist() == [*b'apfel', 0, 0, 0]
    b.obs.set_prompt('ü')
    assert b.obs.prompt == 'ü'
    assert b.step().tolist() == [*'ü'.encode(), 0, 0, 0, 0, 0, 0]
    b.restore(saved)
    assert b.obs.prompt == 'apfel'
    assert b.step().tolist() == [*b'apfel', 0, 0, 0]


def test_a_prompt_that_is_too_long_is_refused_whole() -> None:
    b = observe(term('prompt', encode='bytes', length=4), size=4, dtype='I32')
    b.obs.set_prompt('abcd')
    for text in ('abcde', 'x' * 2000):
        with pytest.raises(Refusal, match='shorten') as refusal:
            b.obs.set_prompt(text)
        assert refusal.value.code is Code.INVALID_ARGUMENT
    assert b.obs.prompt == 'abcd'
    b = observe(term('counter'), size=1)
    b.obs.set_prompt('')
    with pytest.raises(Refusal, match='takes no prompt'):
        b.obs.set_prompt('pick')


def test_a_prompt_topic_gives_its_text_and_changes_nothing() -> None:
    b = observe(term('prompt', 'task', encode='bytes', length=4), size=4)
    [topic] = b.obs.topics()
    assert (topic.topic, topic.type, topic.reliable, topic.prompt) == (
        'task', 'std_msgs/msg/String', True, True)
    assert b.get('task', type('String', (), {'data': 'pick'})()) == 'pick'
    assert b.obs.prompt == ''


def test_prefix_is_the_rest_of_the_running_chunk_the_last_row_repeated() -> None:
    b = observe(term('prefix', length=3), term('prefix_rows'), size=7)
    assert b.obs.prefixes == {'actions'}
    b.step()
    rows = np.array([[1, 2], [3, 4]], np.float32)
    assert b.read(prefix={'actions': rows}).tolist() == [1, 2, 3, 4, 3, 4, 2]
    assert b.read(prefix={'actions': np.repeat(rows, 3, axis=0)}).tolist() == [
        1, 2, 1, 2, 1, 2, 3]
    assert b.read().tolist() == [0] * 7                 # nothing stays from the last inference


# --- witness and guard

def test_p26_witness_is_what_was_latched_and_measured_is_what_is_now() -> None:
    guard = GuardSpec({'joint_position': WitnessLimit(0.2, forceable=True),
                       'finger': WitnessLimit(0.005)})
    b = observe(term('joint_position', 'joint_states', joints=('hip', 'knee'), offset=5.0,
                     max_age_s=0.1), term('projected_gravity', 'imu/data'), size=5, guard=guard)
    b.get('joint_states', joints(T0, {'hip': 1.0, 'knee': 2.0, 'finger': 0.01}))
    b.get('imu/data', imu(T0 + 1))
    b.step()
    b.now = T0 + 50 * MS
    b.get('joint_states', joints(b.now, {'hip': 1.5}))
    values, stamps = b.obs.witness()
    assert values == {
        'joint_position.hip': 1.0, 'joint_position.knee': 2.0, 'joint_position.finger': 0.01,
        'projected_gravity.x': 0.0, 'projected_gravity.y': 0.0, 'projected_gravity.z': -1.0}
    assert stamps['joint_position.finger'] == T0
    assert stamps['projected_gravity.z'] == T0 + 1
    now = b.obs.measured(b.now)
    assert now['joint_position.hip'] == (1.5, b.now, 0.0, 0.1)
    assert now['joint_position.knee'][2] == pytest.approx(0.05)
    assert now['joint_position.finger'].limit_s == 0.5
    assert now['projected_gravity.z'].value == -1.0
    assert b.obs.guard == {
        'joint_position.hip': WitnessLimit(0.2, True), 'joint_position.knee':
        WitnessLimit(0.2, True), 'joint_position.finger': WitnessLimit(0.005)}


def test_p26_what_was_never_measured_is_absent() -> None:
    guard = GuardSpec({'finger': WitnessLimit(0.005), 'joint_velocity': WitnessLimit(0.1)})
    b = observe(term('joint_position', 'joint_states', joints=('hip',)),
                term('joint_velocity', 'joint_states', joints=('hip',)), size=2, guard=guard)
    assert b.obs.measured(b.now) == {}
    b.get('joint_states', joints(T0, names=['hip', 'finger'], position=[1.0, math.nan],
                                 velocity=[0.5, 0.0]))
    b.step()
    assert set(b.obs.measured(b.now)) == set(b.obs.witness()[0]) == {
        'joint_position.hip', 'joint_velocity.hip', 'joint_velocity.finger'}
    assert 'joint_position.finger' in b.obs.guard
