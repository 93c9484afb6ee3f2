"""`flashrt-ros verify`: real policies are proved, and whatever is left out fails by its name."""
from __future__ import annotations

import json
from pathlib import Path
import sys
from typing import Any

from click.testing import CliRunner
import pytest
import yaml

from flashrt_ros.tools.proof import Leaving, Proof
from flashrt_ros.tools.verify import command, prove
from flashrt_ros.tools.verify_inputs import Inputs
from test.shared_data import DATA, data
from test.tools.live_run import POLICY

HERE = Path(__file__).resolve().parent
POLICIES = HERE.parent / 'policies'
G1 = POLICIES / 'g1.yaml'
ACTIONS = 'std_msgs/msg/Float32MultiArray'


def inputs(policy: Path, **more: Any) -> Inputs:
    return Inputs(str(policy), **{'model_root': str(DATA), **more})


def bearing(proof: Proof) -> dict[str, Leaving]:
    """Return the load-bearing buffers by name."""
    assert proof.ok, [c for c in proof.checks if not c.ok]
    return {b.name: b for b in proof.buffers if b.load_bearing}


def written(folder: Path, policy: dict[str, Any], **more: Any) -> Path:
    path = folder / 'policy.yaml'
    path.write_text(yaml.safe_dump({'policy': policy, **more}, sort_keys=False))
    return path


def raw_output(name: str = 'actions') -> dict[str, Any]:
    return {name: {'topic': 'action', 'type': ACTIONS, 'kind': 'raw'}}


# -- what real policies stand on -------------------------------------------------------------------


@pytest.mark.parametrize('bag', [None, 'g1_walk_mcap'])
def test_the_g1_stands_on_h_c_last_action_and_phase(bag: str | None) -> None:
    pytest.importorskip('onnxruntime')
    data('g1_lstm_walk')
    proof = prove(inputs(G1, bag=None if bag is None else str(data('bags', bag))), child=False)
    found = bearing(proof)
    assert set(found) == {'h_in', 'c_in', 'obs.last_action.actions', 'obs.steps'}
    assert found['obs.steps'].what == 'phase'
    assert found['obs.last_action.actions'].what == 'last action'
    assert all(b.step == 0 and (b.largest or 0.0) > 0.05 for b in found.values())


def test_raptor_stands_on_h(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    data('raptor_gru_quadrotor')
    policy = written(tmp_path, {
        'backend': 'onnx', 'model': 'raptor_gru_quadrotor/raptor_gru.onnx', 'period_s': 0.01,
        'state': {'h_in': 'h_out'}}, inputs={'obs': [
            {'term': 'array', 'topic': 'state', 'length': 22}]}, outputs=raw_output('action'))
    assert set(bearing(prove(inputs(policy), child=False))) == {'h_in'}


def test_go2_stands_on_its_history(tmp_path: Path) -> None:
    pytest.importorskip('torch')
    data('go2_himloco_history')
    policy = written(tmp_path, {
        'backend': 'torch', 'model': 'go2_himloco_history/himloco.pt', 'period_s': 0.02,
        'shapes': {'obs_history': [1, 270]}}, inputs={'obs_history': [{
            'term': 'history', 'length': 6, 'of': [
                {'term': 'array', 'topic': 'frame', 'length': 45}]}]}, outputs=raw_output())
    found = bearing(prove(inputs(policy), child=False))
    assert [b.what for b in found.values()] == ['history']


def test_pick_and_place_stands_on_h_and_the_queue(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    data('pickplace_gru_chunk4')
    policy = written(tmp_path, {
        'backend': 'onnx', 'model': 'pickplace_gru_chunk4/pickplace_gru_chunk4.onnx',
        'period_s': 0.05, 'state': {'h_in': 'h_out'}}, inputs={'obs': [
            {'term': 'array', 'topic': 'state', 'length': 39}, {'term': 'episode_start'}]},
        outputs=raw_output())
    found = bearing(prove(inputs(policy), child=False))
    assert set(found) == {'h_in', 'queue.cursor', 'queue.actions.rows'}
    assert found['h_in'].step == 3           # the rest of the chunk is still right


def test_a_new_process_goes_on_from_the_file(tmp_path: Path) -> None:
    proof = prove(Inputs(str(written(tmp_path, **POLICY))))
    assert proof.ok, proof.checks
    (process,) = [c for c in proof.checks if 'new process' in c.name]
    assert 'equal to the byte' in process.detail
    found = {b.name: b for b in proof.buffers}
    assert found['inference'].note == 'changes, does not matter'
    assert found['queue.depth'].note == 'did not change'
    assert {b.what for b in found.values() if b.load_bearing} >= {
        'model', 'history', 'last action', 'phase', 'queue'}


def test_a_journal_is_left_out_with_its_rows(tmp_path: Path) -> None:
    policy = written(tmp_path, {
        'backend': 'host', 'factory': 'flashrt_ros.backends.reference:journal', 'period_s': 0.02},
        inputs={'obs': [{'term': 'array', 'topic': 'x'}],
                'prompt': [{'term': 'prompt', 'encode': 'bytes', 'length': 16}]},
        outputs=raw_output())
    from flashrt_ros.backends import reference
    spec = next(s for s in reference.journal().layout().values() if s.is_journal)
    found = bearing(prove(Inputs(str(policy)), child=False))
    assert spec.name in found
    assert spec.length in found


def test_prompts_pictures_and_joints_are_invented_too(tmp_path: Path) -> None:
    prompted = written(tmp_path, {'backend': 'host', 'factory': 'held_policy:prompted',
                                  'period_s': 0.005}, inputs={
        'obs': [{'term': 'joint_position', 'topic': 'joint_states', 'joints': ['a', 'b', 'c']}],
        'prompt': [{'term': 'prompt', 'encode': 'bytes', 'length': 8}]}, outputs=raw_output())
    sys.path.insert(0, str(POLICIES))
    try:
        proof = prove(Inputs(str(prompted), modules=('held_policy',)), child=False)
    finally:
        sys.path.remove(str(POLICIES))
    found = bearing(proof)
    assert 'prompt' in {b.what for b in found.values()}


# -- what must fail --------------------------------------------------------------------------------


def failed(proof: Proof) -> str:
    """Return what the failed checks say."""
    assert not proof.ok
    return ' | '.join(f'{c.name}: {c.detail}' for c in proof.checks if not c.ok)


def test_a_missing_feedback_pair_fails_with_its_name(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    data('g1_lstm_walk')
    text = G1.read_text().replace('{h_in: h_out, c_in: c_out}', '{h_in: h_out}')
    policy = tmp_path / 'g1.yaml'
    policy.write_text(text)
    said = failed(prove(inputs(policy)))
    assert 'c_in' in said
    assert 'write policy.state: {c_in: c_out}' in said
    result = CliRunner().invoke(command, ['--policy', str(policy), '--model-root', str(DATA)])
    assert result.exit_code == 1
    assert 'NO  configure: input c_in' in result.output


def test_a_forgotten_history_names_the_term_that_would_keep_it(tmp_path: Path) -> None:
    pytest.importorskip('torch')
    data('go2_himloco_history')
    policy = written(tmp_path, {
        'backend': 'torch', 'model': 'go2_himloco_history/himloco.pt', 'period_s': 0.02,
        'shapes': {'obs_history': [1, 270]}}, inputs={'obs_history': [
            {'term': 'array', 'topic': 'frame', 'length': 45}]}, outputs=raw_output())
    said = failed(prove(inputs(policy)))
    assert 'obs_history' in said
    assert '270 = 6 × 45' in said
    assert 'term: history' in said


OWN = '''
import collections
import os
import numpy as np
from flashrt_ros.backends.reference import NumpyPolicy
from flashrt_ros.core.layout import BufferSpec, Role

PAST = collections.deque(maxlen=3)


def remembering(msg):
    """A term that keeps its history in a module variable."""
    PAST.append(np.asarray(msg.data, float))
    return np.mean(PAST, axis=0)


class Plain(NumpyPolicy):
    """actions = obs[:2] * (1 + how often it ran), counted where `where` says."""

    def __init__(self, where):
        super().__init__((
            BufferSpec('obs', (3,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('count', (1,), 'F32', Role.STATE),
            BufferSpec('actions', (1, 2), 'F32', Role.OUTPUT)), {})
        self.where = where
        self.calls = 0

    def tick(self, b):
        b['count'] += 1
        n = b['count'][0]
        if self.where == 'attribute':
            self.calls += 1
            n = self.calls
        if self.where == 'process':
            n = os.getpid() % 1000
        b['actions'][0] = b['obs'][:2] * (1 + n)


def plain(where='buffer'):
    return Plain(where)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, also for child processes."""
    name = f'own_{tmp_path.name}'.replace('-', '_')
    (tmp_path / f'{name}.py').write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    return name


def of_own(folder: Path, module: str, where: str, **term: Any) -> Inputs:
    policy = written(folder, {
        'backend': 'host', 'factory': f'{module}:plain', 'period_s': 0.02,
        'options': {'where': where}}, inputs={'obs': [{
            'term': 'array', 'topic': 'x', 'length': 3, **term}]}, outputs=raw_output())
    return Inputs(str(policy), modules=(module,))


def test_a_policy_whose_state_is_a_buffer_is_proved(tmp_path: Path, own: str) -> None:
    assert set(bearing(prove(of_own(tmp_path, own, 'buffer'), child=False))) == {'count'}


def test_state_in_a_python_attribute_fails_with_its_name(tmp_path: Path, own: str) -> None:
    said = failed(prove(of_own(tmp_path, own, 'attribute')))
    assert 'calls' in said


def test_state_that_lives_in_the_process_is_found_by_the_new_one(tmp_path: Path, own: str) -> None:
    said = failed(prove(of_own(tmp_path, own, 'process')))
    assert 'new process' in said
    assert 'lives in this process only' in said


def test_a_term_that_remembers_is_named(tmp_path: Path, own: str) -> None:
    """Its memory is no STATE: equal messages give other inputs. Only a bag can show it."""
    from test.tools.live_run import START, make, raw, write_bag
    kind = ACTIONS
    frames = [('/x', kind, START + i * 20_000_000, raw(make(
        kind, layout=make('std_msgs/msg/MultiArrayLayout'),
        data=__import__('numpy').array([i % 7, 1.0, -i % 5], 'f4')))) for i in range(120)]
    bag = write_bag(tmp_path / 'bag', frames)
    ask = of_own(tmp_path, own, 'buffer', term=f'{own}:remembering', type=kind)
    said = failed(prove(ask))
    assert 'give a bag with --bag' in said
    said = failed(prove(Inputs(**{**ask.__dict__, 'bag': str(bag)}), child=False))
    assert f'{own}:remembering' in said
    assert 'not STATE' in said


def test_a_buffer_that_a_restore_forgets_fails_with_its_name(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof kills mutants of the restore: here, HOST state that stays behind."""
    from flashrt_ros.core.live import LiveSet
    original = LiveSet.set_host

    def forgetful(self: LiveSet, block: bytes) -> None:
        kept = self.host['queue.cursor'].copy()
        original(self, block)
        self.host['queue.cursor'][:] = kept
    monkeypatch.setattr(LiveSet, 'set_host', forgetful)
    said = failed(prove(Inputs(str(written(tmp_path, **POLICY))), child=False))
    assert 'queue.cursor' in said


# -- the command -----------------------------------------------------------------------------------


def test_json_and_picture(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    policy, picture = written(tmp_path, **POLICY), tmp_path / 'proof.png'
    result = CliRunner().invoke(command, ['--policy', str(policy), '--no-process', '--json',
                                          '--picture', str(picture)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found['proved'] is True
    assert {b['name'] for b in found['buffers'] if b['load_bearing']} >= {'h', 'queue.cursor'}
    assert picture.read_bytes()[:4] == b'\x89PNG'


def test_a_short_bag_is_enough_and_an_unfit_one_is_refused(tmp_path: Path) -> None:
    from test.tools.live_run import LiveRun
    run = LiveRun(tmp_path)
    run.command()
    run.go()
    run.steps(40)
    run.close()
    bag = run.bag()
    proof = prove(Inputs(str(run.policy_file), bag=str(bag)), child=False)
    assert proof.ok, proof.checks
    result = CliRunner().invoke(command, ['--policy', str(G1), '--model-root', str(DATA), '--bag',
                                          str(bag)])
    assert result.exit_code == 1
