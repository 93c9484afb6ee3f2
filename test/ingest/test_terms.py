"""Each built-in term, and the functions that a user supplies."""
from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from test.ingest.messages import T0, array, header, imu, observe, quaternion, term, twist, xyz

STAMPED = header(T0)
POSE = SimpleNamespace(position=xyz(1.0, 2.0, 3.0), orientation=quaternion(0.0, 0.0, 0.6, 0.8))
ODOMETRY = SimpleNamespace(header=STAMPED, pose=SimpleNamespace(pose=POSE),
                           twist=SimpleNamespace(twist=twist(4.0, 5.0, 6.0)))
WRENCH = SimpleNamespace(force=xyz(1.0, 2.0, 3.0), torque=xyz(4.0, 5.0, 6.0))
ODOMETRY_TYPE = 'nav_msgs/msg/Odometry'


@pytest.mark.parametrize(('name', 'keys', 'msg', 'expected'), [
    ('angular_velocity', {}, imu(T0, (1.0, 2.0, 3.0)), [1, 2, 3]),
    ('linear_acceleration', {}, imu(T0, accel=(1.0, 2.0, 3.0)), [1, 2, 3]),
    ('orientation', {}, imu(T0, q=(0.0, 0.0, 0.6, 0.8)), [0, 0, 0.6, 0.8]),
    ('projected_gravity', {}, imu(T0), [0, 0, -1]),
    ('twist', {}, twist(1.0, 2.0, 3.0), [1, 2, 0, 0, 0, 3]),
    ('twist', {'fields': ('angular.z', 'linear.x')}, twist(1.0, 2.0, 3.0), [3, 1]),
    ('twist', {'type': 'geometry_msgs/msg/TwistStamped', 'fields': ('linear.y',)},
     SimpleNamespace(header=STAMPED, twist=twist(1.0, 2.0, 3.0)), [2]),
    ('twist', {'type': ODOMETRY_TYPE}, ODOMETRY, [4, 5, 0, 0, 0, 6]),
    ('pose', {}, SimpleNamespace(header=STAMPED, pose=POSE), [1, 2, 3, 0, 0, 0.6, 0.8]),
    ('pose', {'type': 'geometry_msgs/msg/Pose', 'fields': ('position.y',)}, POSE, [2]),
    ('pose', {'type': ODOMETRY_TYPE, 'fields': ('position.x', 'orientation.w')}, ODOMETRY,
     [1, 0.8]),
    ('wrench', {}, SimpleNamespace(header=STAMPED, wrench=WRENCH), [1, 2, 3, 4, 5, 6]),
    ('wrench', {'type': 'geometry_msgs/msg/Wrench', 'fields': ('torque.z',)}, WRENCH, [6]),
    ('joy', {'fields': ('axes[1]', 'buttons[0]')},
     SimpleNamespace(header=STAMPED, axes=[0.5, -0.5], buttons=[1]), [-0.5, 1]),
    ('array', {'length': 3}, array(1.0, 2.0, 3.0), [1, 2, 3]),
    ('array', {}, array(1.0, 2.0), [1, 2]),                  # the port tells the length
    ('array', {'length': 2}, SimpleNamespace(
        data=[9.0, 1.0, 2.0], layout=SimpleNamespace(data_offset=1)), [1, 2]),
    ('array', {'type': 'x/msg/Y', 'field': 'legs[1].load', 'length': 1}, SimpleNamespace(
        legs=[None, SimpleNamespace(load=7)]), [7])])
def test_every_term_reads_its_message(name: str, keys: dict[str, Any], msg: Any,
                                      expected: list[float]) -> None:
    b = observe(term(name, 'topic', **keys), size=len(expected))
    b.get('topic', msg)
    assert b.missing() == []
    assert b.step().tolist() == np.float32(expected).tolist()


def test_projected_gravity_turns_with_the_body_and_has_length_1() -> None:
    b = observe(term('projected_gravity', 'imu'), size=3)
    s = math.sqrt(0.5)
    for q, expected in (((s, 0.0, 0.0, s), (0.0, -1.0, 0.0)),      # rolled left side up
                        ((0.0, s, 0.0, s), (1.0, 0.0, 0.0)),       # nose down
                        ((1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0)),   # upside down
                        ((0.0, 0.0, s, s), (0.0, 0.0, -1.0))):     # yaw does not matter
        b.get('imu', imu(T0, q=q))
        assert b.step() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize('name', ['orientation', 'projected_gravity'])
def test_an_orientation_that_is_not_there_is_refused(name: str) -> None:
    b = observe(term(name, 'imu'), size=4 if name == 'orientation' else 3)
    with pytest.raises(Refusal, match='unit quaternion'):
        b.get('imu', imu(T0, q=(0.0, 0.0, 0.0, 0.0)))      # would say: upside down
    with pytest.raises(Refusal, match=r'orientation_covariance\[0\] is -1') as refusal:
        b.get('imu', imu(T0, orientation_covariance=[-1.0] + [0.0] * 8))
    assert refusal.value.code is Code.INPUT_REJECTED
    b.get('imu', imu(T0, orientation_covariance=[0.0] * 9, angular_velocity_covariance=[-1.0] * 9))
    assert b.missing() == []


@pytest.mark.parametrize(('spec', 'msg', 'says'), [
    (term('joy', 't', fields=('axes[2]',)), SimpleNamespace(axes=[0.0], buttons=[]), r'axes\[2\]'),
    (term('array', 't', length=1), array(1.0, 2.0), '2 values, the policy takes 1'),
    (term('array', 't', length=1), SimpleNamespace(data=['x']), 'no std_msgs')])
def test_messages_that_do_not_fit_are_refused(spec: Any, msg: Any, says: str) -> None:
    b = observe(spec, size=1)
    with pytest.raises(Refusal, match=says) as refusal:
        b.get('t', msg)
    assert refusal.value.code is Code.INPUT_REJECTED


def test_a_constant_and_one_number_for_each_value() -> None:
    b = observe(term('constant', value=(1.0, 2.0), offset=(1.0, 0.0), scale=0.5), size=2)
    assert b.step().tolist() == [1.0, 1.0]
    with pytest.raises(Refusal, match='3 numbers for the 2 values'):
        observe(term('constant', value=(1.0, 2.0), scale=(1.0, 1.0, 1.0)), size=2)


# --- functions of a module that may supply code: here, this one

def own_term(msg: Any) -> Any:
    return [sum(msg.data), max(msg.data)]


def with_spec(msg: Any, spec: Any) -> Any:
    return np.asarray(msg.data) * spec.options['gain']


def wrong(msg: Any) -> Any:
    raise KeyError(msg)


def tokens(text: str) -> Any:
    return [1, *(len(word) for word in text.split())]


def own(function: str, **keys: Any) -> Any:
    name = f'{__name__}:{function}'
    return term(name, 't', function=name, type='std_msgs/msg/Float32MultiArray', **keys)


def test_a_term_may_be_a_function_of_an_allowed_module() -> None:
    b = observe(own('own_term', length=2, scale=2.0), size=2, modules=(__name__,))
    b.get('t', array(1.0, 2.0))
    assert b.step().tolist() == [6.0, 4.0]
    b = observe(own('with_spec', length=2, options={'gain': 3.0}), size=2, modules=(__name__,))
    b.get('t', array(1.0, 2.0))
    assert b.step().tolist() == [3.0, 6.0]


def test_a_function_that_fails_refuses_the_message() -> None:
    b = observe(own('wrong', length=2), size=2, modules=(__name__,))
    with pytest.raises(Refusal, match='raised KeyError'):
        b.get('t', array(1.0))
    b = observe(own('own_term', length=3), size=3, modules=(__name__,))
    with pytest.raises(Refusal, match='returned 2 values, its length is 3'):
        b.get('t', array(1.0))


def test_code_comes_only_from_modules_that_are_allowed_and_there() -> None:
    with pytest.raises(Refusal, match='may not supply code') as refusal:
        observe(own('own_term', length=2), size=2)
    assert refusal.value.code is Code.INVALID_POLICY_FILE
    with pytest.raises(Refusal, match='may not supply code'):
        observe(term('os:system', 't', function='os:system', type='a/msg/B', length=1), size=1,
                modules=(__name__,))
    with pytest.raises(Refusal, match='cannot be loaded'):
        observe(own('absent', length=2), size=2, modules=(__name__,))


def test_a_prompt_may_have_an_encoder_of_its_own() -> None:
    b = observe(term('prompt', encode=f'{__name__}:tokens', length=4), size=4, dtype='I64',
                modules=(__name__,))
    assert b.step().tolist() == [1, 0, 0, 0]               # what '' encodes to, from the start
    b.obs.set_prompt('red apple')
    assert b.step().tolist() == [1, 3, 5, 0]
    with pytest.raises(Refusal, match='5 values'):
        b.obs.set_prompt('a b c d')
    assert b.obs.prompt == 'red apple'
