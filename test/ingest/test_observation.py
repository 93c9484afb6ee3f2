"""Ages, freshness, clocks, NaN, and what is refused at configure."""
from __future__ import annotations

import math

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.inbox import Arrival
from flashrt_ros.ingest.spec import QosSpec, RunSpec
from test.ingest.messages import T0, S, array, header, imu, joints, observe, term, twist

MS = 1_000_000
RATE = term('angular_velocity', 'imu/data')
COMMAND = term('twist', 'cmd_vel', fields=('linear.x',), latched=True, timeout_s=0.5)


# --- ages and clocks

def test_a_term_never_received_is_named_with_topic_and_limit() -> None:
    b = observe(RATE, size=3)
    [missing] = b.obs.missing(b.now)
    assert (missing.term, missing.topic, missing.age_s, missing.limit_s, missing.why) == (
        'angular_velocity', 'imu/data', None, 0.5, 'never received')


def test_sensor_inputs_have_an_age_limit_though_none_is_written() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(T0))
    b.now = T0 + 500 * MS
    assert b.missing() == []
    b.now += 1
    assert b.missing() == ['angular_velocity (imu/data): 0.500 s old, the limit is 0.500 s']


def test_a_stamp_of_the_same_clock_makes_a_late_message_old() -> None:
    b = observe(term('angular_velocity', 'imu/data', max_age_s=0.1), size=3)
    b.get('imu/data', imu(T0 - 200 * MS), at=T0)
    assert b.missing() == ['angular_velocity (imu/data): 0.200 s old, the limit is 0.100 s']


def test_a_driver_that_repeats_one_frame_for_ever_stays_stale() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(T0))
    b.now = T0 + 120 * S              # further from the stamp than any delay: still its clock
    b.get('imu/data', imu(T0))
    assert 'old' in b.missing()[0]


@pytest.mark.parametrize('stamp', [0, 12 * S, T0 - 86_400 * S, T0 + 86_400 * S])
def test_p27_stamp_zero_and_stamps_of_another_clock_count_by_arrival(stamp: int) -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(stamp))
    assert b.missing() == []
    assert b.missing(after_ns=T0 - 1) == []
    b.now = T0 + 600 * MS
    assert '0.600 s old' in b.missing()[0]


def test_p27_time_zero_before_the_first_clock_is_no_stamp() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(0), at=0)
    b.now = 5 * S
    assert 'arrived before the clock started' in b.missing()[0]
    b.get('imu/data', imu(0), at=5 * S)
    assert b.missing() == []
    # Stamped by the simulator, but received before /clock: the stamp is all there is.
    b = observe(RATE, size=3)
    b.get('imu/data', imu(5 * S), at=0)
    b.now = 5 * S + 100 * MS
    assert b.missing() == []


def test_the_slack_is_the_smallest_limit_less_age_and_latched_terms_have_none() -> None:
    assert observe(term('counter'), size=1).obs.slack_s(T0) is None
    b = observe(term('angular_velocity', 'imu/data', max_age_s=0.3),
                term('joint_position', 'joints', joints=('a', 'b'), max_age_s=1.0),
                term('twist', 'cmd_vel', fields=('linear.x',), latched=True, timeout_s=0.2), size=6)
    assert b.obs.slack_s(T0) == -math.inf          # an input that never came allows no wait
    b.get('imu/data', imu(T0))
    b.get('joints', joints(T0, {'a': 0.0}))
    b.get('joints', joints(T0 - 900 * MS, {'b': 0.0}), at=T0)
    b.get('cmd_vel', twist(1.0))
    assert b.obs.slack_s(T0) == pytest.approx(0.1)             # of the older joint
    b.get('joints', joints(T0, {'b': 0.0}))
    assert b.obs.slack_s(T0 + 400 * MS) == pytest.approx(-0.1)
    b = observe(RATE, size=3, run=RunSpec(trigger=('imu/data',)))
    assert b.obs.slack_s(T0) is None               # in lock step the set decides, not its age


def test_fresh_means_arrived_and_in_the_same_clock_stamped_after_the_restore() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(T0))
    b.now = T0 + 10 * MS
    restore = T0 + 5 * MS
    assert 'not fresh' in b.missing(after_ns=restore)[0]
    b.get('imu/data', imu(T0 + 4 * MS))               # arrives after it, was stamped before
    assert 'not fresh' in b.missing(after_ns=restore)[0]
    b.get('imu/data', imu(T0 + 6 * MS))
    assert b.missing(after_ns=restore) == []


def test_latched_inputs_keep_their_value_and_need_not_be_fresh() -> None:
    b = observe(term('array', 'goal', length=2, latched=True), size=2)
    assert 'never received' in b.missing()[0]
    b.get('goal', array(1.0, 2.0))
    b.now += 3600 * S
    assert b.missing(after_ns=b.now) == []
    assert b.step().tolist() == [1.0, 2.0]


def test_a_latched_input_that_falls_silent_stops_or_becomes_zero() -> None:
    b = observe(COMMAND, size=1)
    b.get('cmd_vel', twist(1.5))
    b.now += 500 * MS
    assert b.missing() == []
    b.now += 1
    assert '0.500 s old' in b.missing()[0]

    b = observe(term('twist', 'cmd_vel', fields=('linear.x',), latched=True, timeout_s=0.5,
                     on_timeout='zero', offset=1.0, scale=2.0), size=1)
    assert b.missing() == []                          # silent so far: zero
    assert b.step().tolist() == [2.0]
    b.get('cmd_vel', twist(1.5))
    assert b.step().tolist() == [5.0]
    b.now += 501 * MS
    assert b.step().tolist() == [2.0]
    b.get('cmd_vel', twist(float('nan')))
    assert b.missing() == ['twist (cmd_vel): linear.x is nan']


def test_what_nobody_measured_is_never_zeroed_by_a_timeout() -> None:
    with pytest.raises(Refusal, match='nobody measured'):
        observe(term('joint_position', 'joint_states', joints=('a',), latched=True, timeout_s=1.0,
                     on_timeout='zero'), size=1)


def test_an_older_message_of_a_topic_is_dropped_and_counted() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(T0 + 10 * MS, (1.0, 0.0, 0.0)))
    b.get('imu/data', imu(T0, (2.0, 0.0, 0.0)))
    assert b.step()[0] == 1.0
    assert b.obs.counters['older'] == 1
    b.get('imu/data', imu(T0 + 10 * MS, (3.0, 0.0, 0.0)))   # equal stamps: the later arrival
    assert b.step()[0] == 3.0


def test_after_a_silence_an_older_stamp_is_a_source_that_started_anew() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(50 * S, (1.0, 0.0, 0.0)))         # counts from its own start
    b.now += S
    b.get('imu/data', imu(2 * S, (2.0, 0.0, 0.0)))
    assert b.step()[0] == 1.0
    b.now += 1
    b.get('imu/data', imu(3 * S, (3.0, 0.0, 0.0)))
    assert b.step()[0] == 3.0


def test_inputs_stamped_too_far_apart_stop_and_name_both() -> None:
    b = observe(RATE, term('joint_position', 'joint_states', joints=('a', 'b')),
                COMMAND, size=6, max_skew_s=0.05)
    b.get('cmd_vel', twist())
    b.get('imu/data', imu(T0 + 50 * MS))
    b.get('joint_states', joints(T0 + 50 * MS, {'a': 0.0}))
    b.get('joint_states', joints(T0, {'b': 0.0}))
    assert b.missing() == []
    b.get('imu/data', imu(T0 + 51 * MS))
    assert b.missing() == ['joint_position (joint_states): stamped 0.051 s before '
                           'angular_velocity (imu/data), the limit is 0.050 s']


def test_a_clock_jump_empties_the_inbox_and_drops_what_was_sent_before_it() -> None:
    b = observe(RATE, COMMAND, size=4)
    b.get('imu/data', imu(T0))
    b.get('cmd_vel', twist())
    b.obs.clear(clock_epoch=1)
    assert [m.why for m in b.obs.missing(b.now)] == ['never received'] * 2
    with pytest.raises(Refusal, match='never received'):
        b.step()
    b.obs.receive('imu/data', imu(T0), Arrival(T0, 0))
    assert b.obs.counters['other_clock'] == 1
    assert 'never received' in b.missing()[0]
    b.obs.receive('imu/data', imu(S), Arrival(S, 1))
    b.obs.receive('cmd_vel', twist(), Arrival(S, 2))   # the jump is heard of here first
    b.now = S
    assert [m.term for m in b.obs.missing(b.now)] == ['angular_velocity']


# --- NaN

@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_p29_nan_or_infinity_in_a_used_field_stops_in_an_unused_one_does_not(bad: float) -> None:
    b = observe(RATE, COMMAND, size=4)
    b.get('imu/data', imu(T0, accel=(bad, bad, bad), q=(bad, 0.0, 0.0, 1.0)))
    b.get('cmd_vel', twist(1.0, bad, bad))
    assert b.missing() == []
    b.step()
    before = b.save()
    b.get('imu/data', imu(T0 + 1, (0.0, bad, 0.0)))
    assert b.missing() == [f'angular_velocity (imu/data): y is {bad}']
    with pytest.raises(Refusal) as refusal:
        b.step()
    assert refusal.value.code is Code.INPUT_STALE
    assert all((before[n] == b.host[n]).all() for n in before)
    b.get('imu/data', imu(T0 + 2))
    assert b.missing() == []


# --- topics and refusals at configure

def test_topics_are_best_effort_newest_only_unless_the_file_wishes_otherwise() -> None:
    b = observe(RATE, COMMAND, term('joint_position', 'joint_states', joints=('a',)), size=5,
                qos={'cmd_vel': QosSpec(reliable=True, depth=3)})
    found = {t.topic: (t.type, t.reliable, t.depth, t.trigger) for t in b.obs.topics()}
    assert found == {'imu/data': ('sensor_msgs/msg/Imu', False, 1, False),
                     'cmd_vel': ('geometry_msgs/msg/Twist', True, 3, False),
                     'joint_states': ('sensor_msgs/msg/JointState', False, 10, False)}


def test_messages_that_cannot_be_read_are_refused_and_nothing_changes() -> None:
    b = observe(RATE, size=3)
    b.get('imu/data', imu(T0, (1.0, 2.0, 3.0)))
    for msg in (twist(), object(), type('Half', (), {'header': header(T0)})()):
        with pytest.raises(Refusal, match='imu/data') as refusal:
            b.get('imu/data', msg)
        assert refusal.value.code is Code.INPUT_REJECTED
    with pytest.raises(Refusal, match='no term reads'):
        b.get('other', imu(T0))
    assert b.step().tolist() == [1.0, 2.0, 3.0]


def test_terms_that_do_not_fit_the_model_are_refused_at_configure() -> None:
    with pytest.raises(Refusal, match='takes 4') as refusal:
        observe(RATE, size=4)
    assert refusal.value.code is Code.INVALID_POLICY_FILE
    with pytest.raises(Refusal, match='as sensor_msgs/msg/Imu'):
        observe(RATE, term('twist', 'imu/data', fields=('linear.x',)), size=4)
    with pytest.raises(Refusal, match='F8'):
        observe(RATE, size=3, dtype='F8_E4M3')


# --- data types of ports

@pytest.mark.parametrize(('dtype', 'expected'), [
    ('F32', [1.6, -2.5, 300.0]), ('F64', [1.6, -2.5, 300.0]), ('F16', [1.6, -2.5, 300.0]),
    ('I32', [2, -2, 300]), ('I64', [2, -2, 300]), ('U8', [2, 0, 255]), ('BOOL', [1, 1, 1])])
def test_every_type_of_port_is_filled(dtype: str, expected: list[float]) -> None:
    b = observe(term('array', 'a', length=3), size=3, dtype=dtype)
    b.get('a', array(1.6, -2.5, 300.0))
    assert b.step().tolist() == pytest.approx(expected, rel=1e-3 if dtype == 'F16' else 1e-7)


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = [1.0, 1.00390625, 1.01171875, -3.14159, 0.0]    # the second and third are ties
    b = observe(term('array', 'a', length=5), size=5, dtype='BF16')
    b.get('a', array(*values))
    bits = b.step().astype(np.uint32) << 16
    assert bits.view(np.float32).tolist() == [1.0, 1.0, 1.015625, -3.140625, 0.0]
