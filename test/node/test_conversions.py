"""Messages and plain data say the same thing."""
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import JointState

from flashrt_ros import msg as ours
from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core import capsule
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.output import Command
from flashrt_ros.ingest.spec import OutputSpec
from flashrt_ros.node import conversions
from flashrt_ros.runtime import phases, sink

RMWError = rclpy_implementation.RMWError


def roundtrip(message: Any) -> Any:
    """Return the message as a subscriber gets it."""
    return deserialize_message(serialize_message(message), type(message))


def command(kind: str = 'position', **fields: Any) -> Command:
    values = np.array([0.5, -0.25])
    return Command(**{'output': 'arm', 'type': '', 'kind': kind, 'names': ('a', 'b'),
                      'values': values, 'time_s': 0.1, 'points': None, 'times': (), 'clipped': 0,
                      'frame_id': 'base', **fields})


def built(kind: str, cmd: Command) -> Any:
    spec = OutputSpec('arm', 'outputs.arm', 'topic', kind, cmd.kind)
    message_class, build = conversions.action_builder(spec)
    message = roundtrip(build(cmd, 3_000_000_007))
    assert isinstance(message, message_class)
    return message


def test_every_number_of_the_enums_is_that_of_the_messages() -> None:
    for name in phases.Phase.__members__:
        assert getattr(ours.PolicyStatus, name) == phases.Phase[name]
    for name in capsule.EventKind.__members__:
        assert getattr(ours.CapsuleEvent, name) == capsule.EventKind[name]
    for name in Code.__members__:
        assert getattr(ours.Code, name) == Code[name]
    for tier in conversions.CapsuleInfo().tier.__class__:
        assert getattr(ours.CapsuleInfo, f'TIER_{tier.name}') == tier


def test_a_capsule_info_keeps_every_field() -> None:
    info = capsule.CapsuleInfo(
        name='a', id='i', parent_id='p', note='n', tick=2**63, step=4, session=2**64 - 1, epoch=6,
        stamp_ns=1_700_000_000_123_456_789, nbytes=7, pinned=True, durable=True, exact=False,
        fingerprint='f', witness={'joint_position.j0': 0.25, 'gripper': -1.0})
    message = roundtrip(conversions.capsule_info(info))
    for field in ('name', 'id', 'parent_id', 'note', 'tick', 'step', 'session', 'epoch', 'tier',
                  'nbytes', 'pinned', 'durable', 'exact', 'fingerprint'):
        assert getattr(message, field) == getattr(info, field), field
    assert conversions.nanoseconds(message.stamp) == info.stamp_ns
    assert dict(zip(message.witness_names, message.witness, strict=True)) == info.witness
    named = set(message.get_fields_and_field_types())
    assert named == {f for f in info.__dataclass_fields__ if f not in ('stamp_ns',)} | {
        'stamp', 'witness_names'}


def test_an_action_chunk_holds_raw_rows_and_the_latch_record() -> None:
    latched = (sink.LatchEntry('joint_states', 5, 9, lambda: 2**64 - 1),)
    record = sink.ChunkRecord('arm', 1, 2, 3, 4, 5, 6, 0.02, ('a', 'b'),
                              np.arange(6, dtype=np.float64).reshape(3, 2), latched)
    message = roundtrip(conversions.action_chunk(record))
    assert message.horizon == 3
    assert list(message.data) == [0, 1, 2, 3, 4, 5]
    assert list(message.names) == ['a', 'b']
    assert (message.session, message.epoch, message.tick, message.step) == (3, 4, 5, 6)
    assert list(message.input_names) == ['joint_states']
    assert list(message.input_digests) == [2**64 - 1]
    assert conversions.nanoseconds(message.input_stamps[0]) == 5


def test_a_digest_is_the_head_of_sha256_of_the_serialised_message() -> None:
    raw = serialize_message(JointState(name=['a'], position=[1.0]))
    assert conversions.digest(raw).to_bytes(8, 'big') == hashlib.sha256(raw).digest()[:8]


def test_a_lazy_message_is_read_when_its_first_field_is() -> None:
    lazy = conversions.Lazy(b'not a message', JointState)
    with pytest.raises(RMWError, match='deserialize'):
        _ = lazy.name
    raw = serialize_message(JointState(name=['a'], position=[1.0]))
    assert list(conversions.Lazy(raw, JointState).position) == [1.0]


@pytest.mark.parametrize(('kind', 'field'), [
    ('position', 'position'), ('velocity', 'velocity'), ('effort', 'effort')])
def test_a_joint_state_carries_the_kind_in_its_field(kind: str, field: str) -> None:
    message = built('sensor_msgs/msg/JointState', command(kind))
    assert list(message.name) == ['a', 'b']
    assert list(getattr(message, field)) == [0.5, -0.25]
    assert conversions.nanoseconds(message.header.stamp) == 3_000_000_007
    others = {'position', 'velocity', 'effort'} - {field}
    assert all(not len(getattr(message, other)) for other in others)


def test_arrays_carry_values_in_their_precision() -> None:
    assert built('std_msgs/msg/Float32MultiArray', command('raw')).data.tolist() == [0.5, -0.25]
    assert built('std_msgs/msg/Float64MultiArray', command('raw')).data.tolist() == [0.5, -0.25]


@pytest.mark.parametrize('stamped', [False, True])
def test_a_twist_has_values_where_the_fields_say(stamped: bool) -> None:
    cmd = command('twist', names=('linear.x', 'angular.z'))
    message = built(f'geometry_msgs/msg/Twist{"Stamped" if stamped else ""}', cmd)
    twist = message.twist if stamped else message
    assert (twist.linear.x, twist.angular.z, twist.linear.y) == (0.5, -0.25, 0.0)
    if stamped:
        assert message.header.frame_id == 'base'


def test_a_trajectory_starts_now_and_has_each_point_at_its_time() -> None:
    cmd = command(points=np.array([[0.5, -0.25], [1.0, 0.0]]), times=(0.1, 1.25))
    message = built('trajectory_msgs/msg/JointTrajectory', cmd)
    assert conversions.nanoseconds(message.header.stamp) == 0
    assert list(message.joint_names) == ['a', 'b']
    assert [list(p.positions) for p in message.points] == [[0.5, -0.25], [1.0, 0.0]]
    times = [conversions.nanoseconds(p.time_from_start) for p in message.points]
    assert times == [100_000_000, 1_250_000_000]


@pytest.mark.parametrize('kind', [
    'sensor_msgs/msg/NoSuch', 'no_such_msgs/msg/Thing', 'os', 'a/b', 'rclpy/msg/Node'])
def test_a_type_that_is_no_message_is_refused(kind: str) -> None:
    with pytest.raises(Refusal) as caught:
        conversions.message_class(kind)
    assert caught.value.code is Code.UNSUPPORTED


def test_goal_messages_keep_every_field() -> None:
    goal = ExecutePolicy.Goal(prompt='p', capsule='c', max_duration_s=1.5, max_ticks=2, shadow=True,
                              if_epoch=3)
    request = conversions.goal_request(goal)
    assert set(goal.get_fields_and_field_types()) == set(request.__dataclass_fields__)
    assert all(getattr(request, f) == getattr(goal, f) for f in request.__dataclass_fields__)
    result = conversions.goal_result(sink.GoalResult(
        Code.RESTORED, 'm', 4, 5, capsule.CapsuleInfo(name='last')))
    assert (result.code, result.message, result.ticks, result.epoch, result.last.name) == (
        Code.RESTORED, 'm', 4, 5, 'last')


def test_a_value_beyond_float32_is_refused_and_not_sent_as_infinity() -> None:
    with pytest.raises(Refusal, match='does not fit into float32'):
        built('std_msgs/msg/Float32MultiArray', command('raw', values=np.array([1.0, 1e300])))
