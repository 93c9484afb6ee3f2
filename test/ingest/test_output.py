"""The output contract: scale, offset, clip, rate, soft start, start rule, stop."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role, Space
from flashrt_ros.ingest.actions import allocate
from flashrt_ros.ingest.output import Command, OutputMap
from flashrt_ros.ingest.spec import OnStop, OutputSpec

JOINTS = ('hip', 'knee', 'ankle')
DT = 0.1


def output(*, blend_s: float = 0.0, dim: int = 3, **changes: Any) -> OutputMap:
    """Return a bound position output with nothing but its joints, changed."""
    spec = dataclasses.replace(OutputSpec(
        'arm', 'outputs.arm', 'arm/command', 'sensor_msgs/msg/JointState', 'position',
        joints=JOINTS, on_stop=OnStop('hold')), **changes)
    found = OutputMap(spec, dim, DT, blend_s)
    found.bind(allocate(found.specs()))
    return found


def at(*positions: float, stamp: int = 5) -> dict[str, tuple[float, int]]:
    return {name: (p, stamp) for name, p in zip(JOINTS, positions, strict=False)}


def send(out: OutputMap, row: list[float], joints: Any = None, **more: Any) -> Command:
    command = out.command(np.array(row, np.float32), at(0, 0, 0) if joints is None else joints,
                          **more)
    assert command is not None
    return command


def test_a_published_value_is_raw_times_scale_plus_offset() -> None:
    command = send(output(scale=0.5, offset=(1.0, 2.0, 3.0)), [2, 4, -6])
    assert command.values.tolist() == [2.0, 4.0, 0.0]
    assert command.values.dtype == np.float64
    assert (command.output, command.type, command.kind, command.names, command.clipped) == (
        'arm', 'sensor_msgs/msg/JointState', 'position', JOINTS, 0)
    assert command.points is None


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3,
                max_size=3))
def test_p22_without_a_contract_the_models_own_bytes_are_published(row: list[float]) -> None:
    out = output(type='std_msgs/msg/Float32MultiArray', kind='raw', joints=(),
                 on_stop=OnStop('none'), scale=1.0, offset=(0.0, 0.0, -0.0))
    raw = np.array(row, np.float32)
    command = out.command(raw, {})
    assert command is not None
    assert command.values.astype(np.float32).tobytes() == raw.tobytes()


def test_p22_minus_zero_stays_minus_zero() -> None:
    assert math.copysign(1, send(output(kind='raw'), [-0.0, 0, 0]).values[0]) == -1


def test_p41_clip_holds_and_is_counted() -> None:
    out = output(clip=((-1.0, -2.0, -3.0), 0.5))
    command = send(out, [-5, 0, 9])
    assert command.values.tolist() == [-1.0, 0.0, 0.5]
    assert command.clipped == 2
    assert send(out, [-1, 0.5, -3]).clipped == 0


def test_p41_the_rate_limit_starts_from_the_measured_joints_and_goes_on_from_the_last_command(
        ) -> None:
    out = output(max_rate=(1.0, 1.0, 10.0))
    command = send(out, [5, 0.55, 5], at(0.5, 0.5, 4.5))
    assert command.values == pytest.approx([0.6, 0.55, 5.0])
    assert command.clipped == 1
    command = send(out, [5, -5, 5], at(9, 9, 9))
    assert command.values == pytest.approx([0.7, 0.45, 5.0])
    assert command.clipped == 2
    assert send(out, [5, -5, 5], dt=0.01).values == pytest.approx([0.71, 0.44, 5.0])
    out.begin()
    assert send(out, [5, 5, 5], at(2, 2, 5)).values == pytest.approx([2.1, 2.1, 5.0])


def test_p41_the_rate_of_a_velocity_starts_from_rest() -> None:
    out = output(kind='velocity', max_rate=2.0, on_stop=OnStop('zero'))
    assert send(out, [1, -1, 0.1], {}).values == pytest.approx([0.2, -0.2, 0.1])
    assert send(out, [1, -1, 0.1], {}).values == pytest.approx([0.4, -0.4, 0.1])


def test_p41_clip_holds_even_where_the_robot_stands_outside_of_it() -> None:
    out = output(max_rate=1.0, clip=(-1.0, 1.0))
    command = send(out, [0, 0, 0], at(2.0, 0.05, -0.05))
    assert command.values == pytest.approx([1.0, 0.0, 0.0])
    assert command.clipped == 1
    assert send(out, [0, 0, 0]).values == pytest.approx([0.9, 0.0, 0.0])


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1,
                     max_size=12),
       start=st.lists(st.floats(-1, 1), min_size=3, max_size=3),
       rate=st.floats(0.1, 5), blend_s=st.sampled_from((0.0, 0.35)))
def test_p41_no_sequence_of_rows_breaks_clip_or_rate(
        rows: list[list[float]], start: list[float], rate: float, blend_s: float) -> None:
    out = output(max_rate=rate, clip=(-1.0, (1.0, 1.5, 2.0)), blend_s=blend_s)
    last = np.array(start)
    for row in rows:
        value = out.command(np.array(row), at(*start)).values  # type: ignore[union-attr]
        assert (value >= -1.0).all()
        assert (value <= [1.0, 1.5, 2.0]).all()
        assert (np.abs(value - last) <= rate * DT + 1e-12).all()
        last = value


def test_limits_that_start_from_joints_that_were_never_measured_send_nothing() -> None:
    for out in (output(max_rate=1.0), output(blend_s=1.0)):
        before = state(out)
        with pytest.raises(Refusal, match='ankle was never measured') as caught:
            send(out, [1, 1, 1], at(0, 0))
        assert caught.value.code is Code.INPUT_STALE
        assert state(out) == before
    assert send(output(), [1, 1, 1], {}).values.tolist() == [1, 1, 1]


def state(out: OutputMap) -> list[bytes]:
    arrays = (out._running, out._published, out._from, out._elapsed)
    return [b'' if a is None else a.tobytes() for a in arrays]


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('kind', ['position', 'raw'])
def test_p29_a_value_that_is_not_finite_is_never_published(bad: float, kind: str) -> None:
    out = output(kind=kind, clip=(-1.0, 1.0), max_rate=1.0)
    send(out, [0, 0, 0])
    before = state(out)
    with pytest.raises(Refusal, match=r'output arm: the model gave .* for knee; nothing') as caught:
        send(out, [1, bad, 1])
    assert caught.value.code is Code.BACKEND
    assert caught.value.details['name'] == 'knee'
    assert state(out) == before


def test_p29_infinities_of_both_signs_and_sums_that_overflow_are_told_apart() -> None:
    out = output(kind='raw', joints=())
    with pytest.raises(Refusal, match='for value 0;'):
        out.command(np.array([math.inf, -math.inf, 1.0]), {})
    huge = np.array([1.7e308, 1.7e308, 1.0])
    assert out.command(huge, {}).values.tolist() == huge.tolist()  # type: ignore[union-attr]


def test_soft_start_goes_from_the_measured_joints_to_the_command_in_blend_s() -> None:
    out = output(blend_s=0.4)
    values = [send(out, [1, 1, 1], at(0, 2, 1)).values.tolist() for _ in range(5)]
    assert values[0] == pytest.approx([0.25, 1.75, 1])
    assert values[1] == pytest.approx([0.5, 1.5, 1])
    assert values[2] == pytest.approx([0.75, 1.25, 1])
    assert values[3:] == [[1, 1, 1], [1, 1, 1]]
    out.begin()
    assert send(out, [1, 1, 1], at(3, 3, 3)).values == pytest.approx([2.5, 2.5, 2.5])


def test_soft_start_of_a_velocity_starts_from_rest_and_raw_has_none() -> None:
    assert send(output(kind='velocity', blend_s=0.4, on_stop=OnStop('zero')), [1, 2, 4], {}
                ).values == pytest.approx([0.25, 0.5, 1.0])
    assert send(output(kind='raw', blend_s=0.4), [1, 2, 4], {}).values.tolist() == [1, 2, 4]


def test_relative_rows_count_from_their_anchor() -> None:
    out = output(relative=True, scale=0.5, offset=0.25)
    command = send(out, [1, 2, 3], anchor=np.array([10.0, 20.0, 30.0]))
    assert command.values.tolist() == [10.75, 21.25, 31.75]
    with pytest.raises(Refusal, match='came without its anchor'):
        send(out, [1, 2, 3])


TRAJECTORY = {'type': 'trajectory_msgs/msg/JointTrajectory'}


def test_a_row_as_trajectory_is_one_point_that_is_reached_in_one_step() -> None:
    command = send(output(**TRAJECTORY), [1, 2, 3])
    assert command.points is not None
    assert (command.points.tolist(), command.times) == ([[1, 2, 3]], (DT,))
    command = send(output(**TRAJECTORY, time_s=0.5), [1, 2, 3])
    assert (command.times, command.time_s) == ((0.5,), 0.5)


def test_a_chunk_as_trajectory_is_sent_once_with_the_rows_that_are_left() -> None:
    out = output(**TRAJECTORY, chunk_as_trajectory=True, clip=(-1.0, 2.0), scale=2.0)
    rest = np.array([[0, 0, 1], [5, 0, -5]], np.float32)
    command = out.command(np.ones(3, np.float32), at(0, 0, 0), rest=rest)
    assert command is not None
    assert command.points is not None
    assert command.points.tolist() == [[2, 2, 2], [0, 0, 2], [2, 0, -1]]
    assert command.times == pytest.approx((0.1, 0.2, 0.3))
    assert command.clipped == 2
    assert out.command(np.ones(3), at(0, 0, 0)) is None


def test_the_points_of_a_chunk_are_those_that_its_rows_would_be_one_by_one() -> None:
    limits = {'max_rate': 3.0, 'clip': (-1.0, 1.0), 'blend_s': 0.25}
    rows = np.array([[1, -2, 0.1], [0, 2, 0.2], [1, 2, -0.3], [3, 0, 0]], np.float32)
    whole = output(**TRAJECTORY, chunk_as_trajectory=True, **limits)
    single = output(**limits)
    joints = at(0.9, 0.0, -0.5)
    command = whole.command(rows[0], joints, rest=rows[1:])
    one_by_one = [single.command(row, joints) for row in rows]
    assert command is not None
    assert command.points is not None
    assert command.points.tolist() == [
        c.values.tolist() for c in one_by_one]  # type: ignore[union-attr]
    assert command.clipped == sum(c.clipped for c in one_by_one)  # type: ignore[union-attr]
    for row in rows[1:]:
        assert whole.command(row, joints, DT / 4) is None, 'its rows are a whole step apart'
    assert state(whole) == state(single)


def test_p37_hold_is_the_measured_pose_whatever_its_age_and_the_limits() -> None:
    out = output(**TRAJECTORY, clip=(-1.0, 1.0), max_rate=0.1, blend_s=1.0,
                 on_stop=OnStop('hold', time_s=0.3))
    send(out, [0, 0, 0])
    before = state(out)
    command = out.on_stop(at(5.0, -5.0, 0.25, stamp=1))
    assert isinstance(command, Command)
    assert command.values.tolist() == [5.0, -5.0, 0.25]
    assert command.points is not None
    assert (command.points.tolist(), command.times) == ([[5.0, -5.0, 0.25]], (0.3,))
    assert state(out) == before


def test_p37_hold_without_a_measurement_says_so_and_sends_nothing() -> None:
    assert output().on_stop(at(1.0, 2.0)) == (
        'output arm: ankle was never measured, so no holding position was sent')
    found = output().on_stop({**at(1, 2, 3), 'hip': (math.nan, 0)})
    assert isinstance(found, str)
    assert 'hip was never measured' in found


def test_p37_zero_and_none() -> None:
    out = output(type='geometry_msgs/msg/TwistStamped', kind='twist', joints=(), frame_id='base',
                 fields=('linear.x', 'linear.y', 'angular.z'), on_stop=OnStop('zero'))
    command = out.on_stop({})
    assert isinstance(command, Command)
    assert (command.values.tolist(), command.names, command.frame_id) == (
        [0, 0, 0], ('linear.x', 'linear.y', 'angular.z'), 'base')
    assert output(on_stop=OnStop('none')).on_stop(at(1, 2, 3)) is None


def test_p38_the_start_rule_names_the_joint_that_is_furthest_away() -> None:
    out = output(start_tolerance=0.1, scale=0.5)
    row = np.array([0.2, 0.4, 0.6], np.float32)
    assert out.start_deviation(row, at(0.1, 0.2, 0.3)) is None
    assert out.start_deviation(row, at(0.19, 0.2, 0.21)) is None
    found = out.start_deviation(row, at(0.1, 0.5, 0.1))
    assert found is not None
    assert found[0] == 'knee'
    assert found[1:] == pytest.approx((0.3, 0.1))
    assert out.start_deviation(row, at(0.1, 0.2, 0.401)) == (
        'ankle', pytest.approx(0.101), 0.1)
    assert out.start_deviation(row, at(0.1, 0.2)) == ('ankle', math.inf, 0.1)
    with pytest.raises(Refusal, match='the model gave nan'):
        out.start_deviation(np.array([0, math.nan, 0]), at(0, 0, 0))


def test_p38_the_start_rule_is_about_what_would_be_commanded_in_the_end() -> None:
    """Clip belongs to it; soft start and rate, which would creep there from anywhere, do not."""
    out = output(start_tolerance=0.1, clip=(-1.0, 1.0), max_rate=0.001, blend_s=100.0)
    row = np.array([5.0, 0, 0])
    assert out.start_deviation(row, at(0.95, 0, 0)) is None
    found = out.start_deviation(row, at(0.5, 0, 0))
    assert found is not None
    assert found[:2] == ('hip', 0.5)
    relative = output(start_tolerance=0.1, relative=True)
    assert relative.start_deviation(np.array([0.05, 0, 0]), at(2, 2, 2), anchor=np.full(3, 2.0)
                                    ) is None


def test_p38_off_and_other_kinds() -> None:
    row = np.array([9.0, 9, 9])
    assert output(start_tolerance=None).start_deviation(row, {}) is None
    assert output(kind='velocity', start_tolerance=0.1).start_deviation(row, {}) is None


def test_all_that_outlives_a_command_is_declared_state() -> None:
    names = {s.name: s for s in output(max_rate=1.0, blend_s=0.5).specs()}
    assert set(names) == {'output.arm.running', 'output.arm.published', 'output.arm.blend_from',
                          'output.arm.blend_elapsed'}
    assert {(s.role, s.space) for s in names.values()} == {(Role.STATE, Space.HOST)}
    assert output().specs() == []
    assert output(clip=(-1.0, 1.0)).specs() == []
    with pytest.raises(Refusal, match=r'no buffer output\.arm\.running'):
        OutputMap(output(max_rate=1.0).spec, 3, DT).bind({})


@pytest.mark.parametrize('left_out', [None, 'running', 'published', 'blend_from', 'blend_elapsed'])
def test_p2_restored_bytes_continue_the_commands_and_each_buffer_is_needed(left_out: str | None
                                                                           ) -> None:
    rows = np.random.default_rng(3).normal(size=(20, 3)) * 0.3
    for cut in range(1, 7):
        out = output(max_rate=2.0, blend_s=0.75)
        host = allocate(out.specs())
        out.bind(host)
        for row in rows[:cut]:
            out.command(row, at(0.1, 0.2, 0.3))
        kept = {name: a.copy() for name, a in host.items()}
        expected = [out.command(row, at(9, 9, 9)).values.tobytes()  # type: ignore[union-attr]
                    for row in rows[cut:]]
        for a in host.values():
            a[...] = 7
        host['output.arm.running'][:] = 0
        for name, a in host.items():
            if name != f'output.arm.{left_out}':
                a[...] = kept[name]
        again = [out.command(row, at(9, 9, 9)).values.tobytes()  # type: ignore[union-attr]
                 for row in rows[cut:]]
        assert (again == expected) == (left_out is None), cut
