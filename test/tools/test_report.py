"""`flashrt-ros report`: what a bag holds, and the terms that a newcomer would write for it."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
import pytest
import yaml

from flashrt_ros.core.errors import Refusal
from flashrt_ros.tools.replaying import Ask, replay
from flashrt_ros.tools.report import command
from test.shared_data import data
from test.tools.live_run import LiveRun
from test.tools.replayed import rewinds


def report(bag: Path, *options: str) -> dict[str, Any]:
    """Return the report of a bag."""
    result = CliRunner().invoke(command, [str(bag), '--json', *options])
    if isinstance(result.exception, Refusal):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_terms_it_suggests_make_a_policy_file_that_runs(tmp_path: Path) -> None:
    """Copied as they stand, for a bag of custom messages in a folder with an odd name."""
    bag = data('bags', 'crab_adya_gait.bag')
    topics = {t['name']: t for t in report(bag)['topics']}
    assert topics['/load_cell_data']['type'] == 'crab_interfaces/msg/LoadCell'
    assert topics['/servo/position_data']['hz'] == pytest.approx(100, abs=1)
    (term,) = topics['/servo/position_data']['terms']
    policy = tmp_path / 'p.yaml'
    policy.write_text(yaml.safe_dump({
        'policy': {'backend': 'host', 'factory': 'flashrt_ros.backends.reference:recurrent',
                   'period_s': 0.01, 'options': {'obs_dim': 2}},
        'run': {'trigger': {'input': ['/servo/position_data']}},
        'inputs': {'obs': [yaml.safe_load(term)]},
        'outputs': {'actions': {'topic': 'a', 'type': 'std_msgs/msg/Float32MultiArray',
                                'kind': 'raw'}}}))
    assert replay(Ask(bag, policy, compare=False)).report.steps == 1300


def test_joints_imu_and_commands_of_a_walking_robot() -> None:
    found = report(data('bags', 'g1_walk_mcap'))
    terms = {t['name']: [yaml.safe_load(x) for x in t['terms']] for t in found['topics']}
    assert [t['term'] for t in terms['/imu/data']] == [
        'angular_velocity', 'linear_acceleration', 'orientation', 'projected_gravity']
    assert len(terms['/joint_states'][0]['joints']) == 12
    assert terms['/cmd_vel'] == [{'term': 'twist', 'topic': '/cmd_vel'}]
    assert terms['/policy/action'][0]['length'] == 12


def test_a_recorded_run_is_summed_up(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, {'run': {'persist_on': ['save']}}, directory=tmp_path / 'capsules')
    rewinds(run)
    with pytest.raises(Refusal):
        run.verb().drop('never')
    run.close()
    bag = run.bag()
    (told,) = report(bag)['runs']
    assert told['node'] == '/robot/policy_node'
    assert told['ticks'] == len(run.chunks)
    assert told['rewinds'] == ['restored x', 'rolled_back x', 'reset origin']
    assert told['capsules'] == ['x']
    assert sum(told['refusals'].values()) == 1
    printed = CliRunner().invoke(command, [str(bag)]).output
    assert 'durable capsules: x' in printed
    assert 'term: joint_position' in printed


def test_what_cannot_be_read_is_part_of_the_report() -> None:
    found = report(data('bags_bad', 'rosbag2_no_metadata_split'))
    assert 'no metadata.yaml' in found['remarks'][0]
    assert report(data('bags_bad', 'rosbag2_empty_bag'))['messages'] == 0
    with pytest.raises(Refusal, match='cut off'):
        report(data('bags_bad', 'g1_walk_truncated.mcap'))
