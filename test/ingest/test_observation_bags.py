"""Observations built from real bags equal those that the policies were run on, bit by bit."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flashrt_ros.ingest.spec import RunSpec, TermSpec
from test.ingest.messages import Bound, array, observe, term
from test.shared_data import data


def messages(bag: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield `(topic, message, time)` of a bag."""
    highlevel = pytest.importorskip('rosbags.highlevel')
    typesys = pytest.importorskip('rosbags.typesys')
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    with highlevel.AnyReader([bag], default_typestore=store) as reader:
        for connection, time, raw in reader.messages():
            yield connection.topic[1:], reader.deserialize(raw, connection.msgtype), time


def walker(joints: tuple[str, ...], config: dict[str, Any], run: RunSpec) -> Bound:
    """The observation of the Unitree walking policies, written as terms."""
    rest = tuple(-q for q in config['default_angles'])
    terms: list[TermSpec] = [
        term('angular_velocity', 'imu/data', scale=config['ang_vel_scale']),
        term('projected_gravity', 'imu/data'),
        term('twist', 'cmd_vel', fields=('linear.x', 'linear.y', 'angular.z'),
             scale=tuple(config['cmd_scale']), latched=True, timeout_s=0.5, on_timeout='zero'),
        term('joint_position', 'joint_states', joints=joints, offset=rest,
             scale=config['dof_pos_scale']),
        term('joint_velocity', 'joint_states', joints=joints, scale=config['dof_vel_scale']),
        term('last_action'), term('phase', period_s=0.8)]
    return observe(*terms, size=config['num_obs'], actions=config['num_actions'], run=run)


@pytest.mark.parametrize('trigger', [('joint_states', 'imu/data', 'cmd_vel'), 'timer'])
def test_the_g1_bag_gives_the_recorded_observations_bit_by_bit(trigger: Any) -> None:
    bag, folder = data('bags', 'g1_walk_mcap'), data('g1_lstm_walk')
    expected = np.load(data('bags', 'g1_walk_mcap_expected.npz'))
    config = yaml.safe_load((folder / 'sim' / 'g1.yaml').read_text())
    b: Bound | None = None
    n = 0
    for topic, msg, time in messages(bag):
        if b is None:
            b = walker(tuple(msg.name), config, RunSpec(trigger=trigger))
        b.now = time
        if topic != 'policy/action':
            b.get(topic, msg)
            continue
        assert b.obs.take() == (trigger != 'timer')
        assert b.missing() == []
        observed = b.step()
        assert observed.tobytes() == expected['obs'][n].tobytes(), n
        assert [e.name for e in b.entries] == ['joint_states', 'imu/data', 'cmd_vel']
        b.obs.set_last_action({'actions': np.asarray(msg.data)})
        n += 1
    assert n == len(expected['obs']) == 500


def test_the_go2_history_equals_the_recorded_one() -> None:
    expected = np.load(data('go2_himloco_history', 'expected_200.npz'))
    b = observe(term('history', of=(term('array', 'frame', length=45),), length=6),
                shape=(1, 270))
    for frame in expected['obs']:
        b.get('frame', array(*frame.tolist()))
        value = b.step()
    assert value.reshape(6, 45).tobytes() == expected['final_history'].tobytes()


def test_joints_of_a_recorded_robot_at_1_khz() -> None:
    bag = data('bags', 'plotjuggler_fake_joint_state')
    b: Bound | None = None
    n = 0
    for topic, msg, time in messages(bag):
        if b is None:
            b = observe(term('joint_position', topic, joints=(msg.name[4], msg.name[1])), size=2)
        b.now = time
        b.get(topic, msg)
        assert b.missing() == []
        assert b.step().tolist() == np.float32(msg.position[[4, 1]]).tolist()
        n += 1
    assert n == 2725
