"""`flashrt-ros replay`: real bags and policies, bags without a record, what is printed."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
import numpy as np
import pytest
import yaml

from flashrt_ros.core.errors import Refusal
from flashrt_ros.tools.bags import open_bag
from flashrt_ros.tools.compare import Series, Verdict, compare, pair_in_order
from flashrt_ros.tools.replay import command
from flashrt_ros.tools.replaying import Ask, replay
from test.shared_data import DATA, data
from test.tools.live_run import (
    ACTIONS,
    JOINT_STATE,
    START,
    header,
    make,
    raw,
    write_bag,
)

G1 = Path(__file__).resolve().parents[1] / 'policies' / 'g1.yaml'
PERIOD = 20_000_000


def run(*arguments: Any) -> Result:
    """Run the command; a refusal is its exception."""
    return CliRunner().invoke(command, [str(a) for a in arguments])


def variant(folder: Path, source: Path = G1, **changes: Any) -> Path:
    """Write a policy file with sections replaced."""
    path = folder / 'variant.yaml'
    path.write_text(yaml.safe_dump({**yaml.safe_load(source.read_text()), **changes},
                                   sort_keys=False))
    return path


def g1_torch(folder: Path) -> Path:
    """The same policy as TorchScript, whose state lies in module buffers."""
    inputs = yaml.safe_load(G1.read_text())['inputs']['obs']
    return variant(folder, policy={
        'backend': 'torch', 'model': 'g1_lstm_walk/motion.pt', 'period_s': 0.02,
        'shapes': {'x': [1, 47]}}, inputs={'x': inputs})


# -- the recorded walk of the G1 -------------------------------------------------------------------


def test_the_g1_s_walk_is_repeated_with_onnx_to_1e_5() -> None:
    pytest.importorskip('onnxruntime')
    bag = data('bags', 'g1_walk_mcap')
    result = run(bag, '--policy', G1, '--model-root', DATA, '--tolerance', '1e-5')
    assert result.exit_code == 0, result.output
    assert 'same: the largest difference is' in result.output
    result = run(bag, '--policy', G1, '--model-root', DATA, '--json')
    assert result.exit_code == 1             # the bag was recorded with torch
    report = json.loads(result.stdout)
    (actions,) = report['outputs']
    assert (actions['compared'], actions['recorded'], report['steps']) == (500, 500, 500)
    assert 0 < actions['largest'] < 1e-5
    assert report['verdict'] == 'different'
    assert actions['first']['step'] == 0


def test_the_g1_s_walk_is_repeated_with_torch_to_the_byte(tmp_path: Path) -> None:
    """Against the bare module here, on the recorded inputs: the bag itself is of another CPU."""
    torch = pytest.importorskip('torch')
    bag, expected = data('bags', 'g1_walk_mcap'), data('bags', 'g1_walk_mcap_expected.npz')
    with np.load(expected) as file:
        observations = file['obs']
    module = torch.jit.load(str(data('g1_lstm_walk', 'motion.pt'))).eval()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            bare = [np.zeros(12, np.float32)]
            for o in observations:
                o[33:45] = bare[-1]          # the loop is closed here, not on the other CPU
                bare.append(module(torch.from_numpy(o[None])).numpy()[0].copy())
    finally:
        torch.set_num_threads(before)
    steps = iter(bare[1:])
    messages = []
    with open_bag(bag) as opened:
        for m in opened.messages(opened.topics):
            content = raw(make(ACTIONS, layout=make('std_msgs/msg/MultiArrayLayout'),
                               data=next(steps))) if m.topic == '/policy/action' else m.raw
            messages.append((m.topic, m.type, m.time_ns, content))
    mine = write_bag(tmp_path / 'mine', messages)
    policy = g1_torch(tmp_path)
    report = replay(Ask(mine, policy, DATA)).report
    assert report.verdict is Verdict.SAME
    (actions,) = report.outputs
    assert (actions.compared, actions.same_bytes, actions.largest) == (500, True, 0.0)
    report = replay(Ask(bag, policy, DATA, tolerance=2e-6)).report
    assert report.verdict is Verdict.SAME, report.summary()


def test_diff_finds_where_a_build_and_where_a_policy_file_parts(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    bag = data('bags', 'g1_walk_mcap')
    policy = yaml.safe_load(G1.read_text())
    policy['inputs']['obs'][6]['period_s'] = 0.82
    other = variant(tmp_path, inputs=policy['inputs'])
    arguments = (bag, '--policy', G1, '--model-root', DATA, '--tolerance', '1e-4', '--until',
                 'step=60', '--diff')
    result = run(*arguments, other, '--json')
    assert result.exit_code == 1
    found = json.loads(result.stdout)['diff']
    assert (found['differs'], found['tick'], found['where']) == (
        True, 1, 'input obs[45], the term phase (sin)')
    result = run(*arguments, other)
    assert 'g1.yaml and variant.yaml part at tick 1 (step 0) in input obs[45]' in result.output
    result = run(*arguments, G1)
    assert result.exit_code == 0, result.output
    assert 'no difference in 60 ticks' in result.output


def test_a_trace_of_another_machine_can_be_compared(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    pytest.importorskip('torch')
    bag, trace = data('bags', 'g1_walk_mcap'), tmp_path / 'trace.npz'
    common = ('--model-root', DATA, '--tolerance', '1e-5', '--until', 'step=30')
    result = run(bag, '--policy', g1_torch(tmp_path), *common, '--trace', trace)
    assert result.exit_code == 0, result.output
    result = run(bag, '--policy', G1, *common, '--diff', trace)
    assert result.exit_code == 0, result.output
    assert 'no difference in 30 ticks between g1.yaml and variant.yaml' in result.output
    result = run(bag, '--policy', G1, '--model-root', DATA, '--until', 'step=30', '--diff', trace)
    assert 'part at tick 1 (step 0) in state h_in / hidden_state' in result.output
    trace.write_bytes(b'no trace')
    with pytest.raises(Refusal, match='is no trace'):
        raise run(bag, '--policy', G1, *common, '--diff', trace).exception


def test_the_two_streams_are_a_file_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    pytest.importorskip('matplotlib')
    bag = data('bags', 'g1_walk_mcap')
    common = (bag, '--policy', G1, '--model-root', DATA, '--until', 'step=40', '--tolerance', 1e-5)
    npz, table, picture = (tmp_path / n for n in ('s.npz', 's.csv', 's.png'))
    assert run(*common, '--save', npz, '--picture', picture).exit_code == 0
    assert run(*common, '--save', table).exit_code == 0
    with np.load(npz) as file:
        recorded, replayed = file['actions/actions/recorded'], file['actions/actions/replayed']
    assert recorded.shape == replayed.shape == (40, 12)
    assert 0 < np.abs(recorded - replayed).max() < 1e-5
    rows = table.read_text().splitlines()
    assert rows[0].startswith('output,of,step,tick,time_ns,row,value,recorded,replayed')
    assert len(rows) == 1 + 40 * 12
    assert picture.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    with pytest.raises(Refusal, match=r'\.npz or \.csv'):
        raise run(*common, '--save', tmp_path / 's.txt').exception


def test_until_by_seconds_ticks_and_steps() -> None:
    pytest.importorskip('onnxruntime')
    bag = data('bags', 'g1_walk_mcap')
    for until, steps in (('0.5', 26), ('tick=7', 7), ('step=3', 3)):
        result = run(bag, '--policy', G1, '--model-root', DATA, '--until', until, '--tolerance',
                     1e-5, '--json')
        assert json.loads(result.stdout)['steps'] == steps, until
    assert run(bag, '--policy', G1, '--until', 'noon').exit_code == 2


# -- other real bags -------------------------------------------------------------------------------


def reference(folder: Path, terms: list[Any], topic: str, values: int, **run_: Any) -> Path:
    """Write a policy file of the package's recurrent reference policy."""
    path = folder / 'reference.yaml'
    path.write_text(yaml.safe_dump({
        'policy': {'backend': 'host', 'factory': 'flashrt_ros.backends.reference:recurrent',
                   'period_s': 0.02, 'options': {'obs_dim': values, 'action_dim': 2}},
        'run': {'trigger': {'input': [topic]}} | run_,
        'inputs': {'obs': terms},
        'outputs': {'actions': {'topic': 'action', 'type': ACTIONS, 'kind': 'raw'}}}))
    return path


def test_a_bag_of_custom_messages_in_a_folder_named_bag(tmp_path: Path) -> None:
    policy = reference(tmp_path, [{
        'term': 'array', 'topic': '/servo/position_data', 'type': 'crab_interfaces/msg/ServoData',
        'length': 2, 'scale': 0.001}], '/servo/position_data', 2)
    ask = Ask(data('bags', 'crab_adya_gait.bag'), policy, compare=False)
    report = replay(ask).report
    assert (report.verdict, report.steps) == (Verdict.SAME, 1300)
    assert replay(ask).report.steps == 1300


def test_both_plotjuggler_bags(tmp_path: Path) -> None:
    policy = reference(tmp_path, [{'term': 'angular_velocity', 'topic': '/imu'},
                                  {'term': 'array', 'topic': '/battery', 'field': 'voltage',
                                   'type': 'sensor_msgs/msg/BatteryState', 'length': 1}],
                       '/imu', 4)
    report = replay(Ask(data('bags', 'plotjuggler_rosbag2_test'), policy, compare=False)).report
    assert report.steps > 1500
    policy = reference(tmp_path, [{'term': 'joint_position', 'topic': 'joint_states', 'joints': [
        'joint_4', 'joint_1']}], 'joint_states', 2)
    bag = data('bags', 'plotjuggler_fake_joint_state')
    with pytest.raises(Refusal, match='--remap joint_states:=/fake_joints_state'):
        replay(Ask(bag, policy))
    report = replay(Ask(bag, policy, remaps={'joint_states': '/fake_joints_state'},
                        compare=False)).report
    assert report.steps == 2725


def test_a_bag_without_actions_is_incomplete_unless_that_is_meant(tmp_path: Path) -> None:
    policy = reference(tmp_path, [{'term': 'joint_position', 'topic': '/fake_joints_state',
                                   'joints': ['joint_1', 'joint_2']}], '/fake_joints_state', 2)
    bag = data('bags', 'plotjuggler_fake_joint_state')
    result = run(bag, '--policy', policy)
    assert result.exit_code == 1
    assert 'incomplete: nothing was recorded to compare with' in result.output
    result = run(bag, '--policy', policy, '--no-compare')
    assert result.exit_code == 0
    assert 'nothing was compared' in result.output


@pytest.mark.parametrize('bag', ['g1_walk_truncated.mcap', 'lfs_pointer.mcap', 'rosbag2_empty_bag',
                                 'rosbag2_no_metadata_split', 'rosbag2_talker_db3',
                                 'rosbag2_wrong_serialization_mcap'])
def test_every_bad_bag_is_refused_with_a_sentence(tmp_path: Path, bag: str) -> None:
    policy = reference(tmp_path, [{'term': 'joint_position', 'topic': '/joint_states', 'joints': [
        'a', 'b']}], '/joint_states', 2)
    refusal = run(data('bags_bad', bag), '--policy', policy).exception
    assert isinstance(refusal, Refusal)
    assert len(refusal.message) > 20


# -- awkward messages ------------------------------------------------------------------------------


def positions(*values: float, ns: int, names: tuple[str, ...] = ('a', 'b')) -> bytes:
    return raw(make(JOINT_STATE, header=header(ns), name=list(names),
                    position=np.array(values, float)))


def bag_of(folder: Path, frames: list[bytes], period: int = PERIOD) -> Path:
    """Write a bag of JointStates."""
    return write_bag(folder / 'bag', [('/joint_states', JOINT_STATE, START + i * period, f)
                                      for i, f in enumerate(frames)])


@pytest.fixture
def two_joints(tmp_path: Path) -> Path:
    return reference(tmp_path, [{'term': 'joint_position', 'topic': 'joint_states', 'joints': [
        'a', 'b']}], 'joint_states', 2)


def test_nan_stops_the_run_and_says_where(tmp_path: Path, two_joints: Path) -> None:
    frames = [positions(0.1, 0.2, ns=START + i) for i in range(9)]
    frames[4] = positions(0.1, float('nan'), ns=START + 4)
    report = replay(Ask(bag_of(tmp_path, frames), two_joints, compare=False)).report
    assert report.verdict is Verdict.INCOMPLETE
    assert 'stopped at 0.080 s' in report.summary()
    assert 'b is nan' in report.summary()
    assert report.steps == 4


def test_messages_that_name_a_joint_twice_or_not_at_all_are_rejected(
        tmp_path: Path, two_joints: Path) -> None:
    frames = [positions(0.1, 0.2, ns=START + i) for i in range(6)]
    frames[2] = positions(0.1, 0.2, ns=START + 2, names=('a', 'a'))
    frames[3] = positions(0.1, 0.2, ns=START + 3, names=('', ''))
    frames[4] = positions(0.1, 0.2, ns=START + 4, names=('a',))
    report = replay(Ask(bag_of(tmp_path, frames), two_joints, compare=False)).report
    assert report.steps == 3
    assert any('the joint a stands twice' in r for r in report.remarks)
    assert sum('1 message rejected' in r for r in report.remarks) == 3


@pytest.mark.parametrize(('stamps', 'steps'), [
    ([0, 0, 0, 0], 4),                                   # no stamp at all: by arrival
    ([1, 1, 2, 3], 4),                                   # twice
    ([4, 3, 2, 1], 4)])                                  # backwards, of one topic: as they come
def test_stamps_zero_twice_and_backwards(tmp_path: Path, two_joints: Path, stamps: list[int],
                                         steps: int) -> None:
    frames = [positions(0.1, 0.2, ns=s and START + s) for s in stamps]
    report = replay(Ask(bag_of(tmp_path, frames), two_joints, compare=False)).report
    assert report.steps == steps


def test_a_topic_of_another_type_is_refused(tmp_path: Path, two_joints: Path) -> None:
    bag = write_bag(tmp_path / 'bag', [('/joint_states', ACTIONS, START, raw(make(
        ACTIONS, layout=make('std_msgs/msg/MultiArrayLayout'), data=np.zeros(2, np.float32))))])
    with pytest.raises(Refusal, match=r'read as sensor_msgs/msg/JointState, but /joint_states'):
        replay(Ask(bag, two_joints))


def test_a_timer_without_a_record_is_simulated_and_says_so(tmp_path: Path) -> None:
    policy = reference(tmp_path, [{'term': 'joint_position', 'topic': 'joint_states', 'joints': [
        'a', 'b']}], 'joint_states', 2, trigger='timer')
    bag = bag_of(tmp_path, [positions(0.1, 0.1 * i, ns=START + i * PERIOD // 2)
                            for i in range(40)], PERIOD // 2)
    report = replay(Ask(bag, policy, compare=False)).report
    assert report.steps == 19
    assert any('steps by a timer' in r for r in report.remarks)
    report = replay(Ask(bag, policy, compare=False, trigger=('joint_states',))).report
    assert report.steps == 40


def test_lost_actions_do_not_shift_the_others(tmp_path: Path, two_joints: Path) -> None:
    frames = [positions(0.1 * i, 0.2, ns=START + i * PERIOD) for i in range(10)]
    result = replay(Ask(bag_of(tmp_path, frames), two_joints, compare=False))
    assert result.report.steps == 10
    ask = Ask(tmp_path / 'with', two_joints)
    from flashrt_ros.tools.offline import open_policy
    policy = open_policy(two_joints)
    policy.begin()
    messages: list[tuple[str, str, int, bytes]] = []
    with open_bag(tmp_path / 'bag') as opened:
        for m in opened.messages(opened.topics):
            policy.clock.ns = m.time_ns
            policy.feed('joint_states', opened.decode(m))
            messages.append((m.topic, m.type, m.time_ns, m.raw))
            values = policy.sink.sent[-1].command.values.astype(np.float32)
            if len(messages) not in (7, 8):
                messages.append(('/action', ACTIONS, m.time_ns + 1000, raw(make(
                    ACTIONS, layout=make('std_msgs/msg/MultiArrayLayout'), data=values))))
    policy.close()
    write_bag(tmp_path / 'with', messages)
    report = replay(ask).report
    assert report.verdict is Verdict.INCOMPLETE
    assert 'lacks 2 actions of actions (first: step 3)' in report.summary()
    assert report.outputs[0].largest == 0.0


def test_a_namespace_and_an_ambiguous_topic(tmp_path: Path, two_joints: Path) -> None:
    frame = positions(0.1, 0.2, ns=START)
    bag = write_bag(tmp_path / 'two', [(f'/{r}/joint_states', JOINT_STATE, START + i, frame)
                                       for i, r in enumerate(('left', 'right'))])
    with pytest.raises(Refusal, match='may be /left/joint_states, /right/joint_states'):
        replay(Ask(bag, two_joints))
    assert replay(Ask(bag, two_joints, namespace='/left', compare=False)).report.steps == 1


def test_comparing_treats_nan_shapes_and_order_as_a_reader_expects() -> None:
    from flashrt_ros.tools.compare import Row

    def rows(*values: Any) -> list[Row]:
        return [Row(i, i, i, np.array(v, float)) for i, v in enumerate(values)]
    nan = float('nan')
    c = compare(Series('o', 'actions', ('x', 'y'), rows([1, nan], [1, 2]), rows([1, nan], [1, 3])),
                0.5)
    assert (c.beyond, c.largest, c.first.value if c.first else '') == (1, 1.0, 'y')
    assert compare(Series('o', 'actions', (), rows([nan]), rows([1])), 1e9).largest == float('inf')
    assert compare(Series('o', 'actions', (), rows([1, 2]), rows([1])), 1e9).beyond == 1
    series = Series('o', 'actions', (), rows([0], [1], [7], [2]), rows([1], [2]))
    pair_in_order(series, 0.0)
    assert ([r.values[0] for r in series.recorded], series.unmatched) == ([1, 2], 2)
