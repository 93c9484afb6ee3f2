"""Policies that robots run, through the backends alone, against recorded values.

The recorded values come from another CPU. Where a line says byte, the bare model beside it in the
same process is the reference.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_ros.core.errors import Refusal
from test.backends.live import Live
from test.shared_data import data

G1_PAIRS = {'h_in': 'h_out', 'c_in': 'c_out'}


def run(policy: Live, name: str, observations: np.ndarray, wipe_at: int | None = None,
        output: str = 'actions') -> np.ndarray:
    policy.wipe()
    out = []
    for i, obs in enumerate(observations):
        if i == wipe_at:
            policy.put({n: bytes(len(b)) for n, b in policy.state().items()})
        out.append(policy.tick(**{name: obs.reshape(policy.b[name].shape)})[output])
    return np.concatenate(out)


def recorded(folder: str, file: str) -> dict[str, np.ndarray]:
    with np.load(data(folder, file)) as f:
        return dict(f)


def g1_onnx() -> Live:
    pytest.importorskip('onnxruntime')
    return Live('onnx', model=Path('g1_lstm.onnx'), state=G1_PAIRS,
                model_root=data('g1_lstm_walk'))


def test_g1_walks_as_recorded_with_onnx():
    want, policy = recorded('g1_lstm_walk', 'expected_200_onnx.npz'), g1_onnx()
    np.testing.assert_allclose(run(policy, 'obs', want['obs']), want['actions'], atol=1e-6)
    np.testing.assert_allclose(policy.b['h_in'], want['final_h'], atol=1e-6)
    np.testing.assert_allclose(policy.b['c_in'], want['final_c'], atol=1e-6)


def test_g1_with_its_memory_wiped_diverges_as_recorded():
    want = recorded('g1_lstm_walk', 'expected_200.npz')
    got = run(g1_onnx(), 'obs', want['obs'], wipe_at=100)
    np.testing.assert_allclose(got, want['actions_zeroed_at_100'], atol=1e-5)
    assert abs(got[100] - want['actions'][100]).max() > 1.5
    assert (abs(got - want['actions']).max(axis=1)[100:] > 1e-3).sum() >= 88


@pytest.mark.parametrize('pairs', [{}, {'h_in': 'h_out'}, {'c_in': 'c_out'}])
def test_p20_g1_without_a_pair_is_refused(pairs):
    pytest.importorskip('onnxruntime')
    with pytest.raises(Refusal, match='looks like state'):
        Live('onnx', model=Path('g1_lstm.onnx'), state=pairs, model_root=data('g1_lstm_walk'))


def test_raptor_flies_as_upstream_recorded():
    pytest.importorskip('onnxruntime')
    want = recorded('raptor_gru_quadrotor', 'expected_500.npz')
    policy = Live('onnx', model=Path('raptor_gru.onnx'), state={'h_in': 'h_out'},
                  model_root=data('raptor_gru_quadrotor'))
    got = run(policy, 'obs', want['obs'], output='action')
    np.testing.assert_allclose(got, want['actions'], atol=1e-6)
    np.testing.assert_allclose(got, want['upstream_actions'], atol=1e-6)
    np.testing.assert_allclose(run(policy, 'obs', want['obs'], 250, 'action'),
                               want['actions_zeroed_at_250'], atol=1e-6)


def test_pickplace_gives_its_chunks_and_remembers_the_goal():
    pytest.importorskip('onnxruntime')
    want = recorded('pickplace_gru_chunk4', 'expected_episode.npz')
    policy = Live('onnx', model=Path('pickplace_gru_chunk4.onnx'), state={'h_in': 'h_out'},
                  model_root=data('pickplace_gru_chunk4'))
    got = run(policy, 'obs', want['obs'])
    np.testing.assert_allclose(got, want['chunks'], atol=5e-6)
    wiped = run(policy, 'obs', want['obs'], wipe_at=5)
    assert abs(wiped[5] - got[5]).max() > 0.05


def g1_torch() -> Live:
    pytest.importorskip('torch')
    return Live('torch', model=Path('motion.pt'), shapes={'x': (1, 47)},
                model_root=data('g1_lstm_walk'))


def test_g1_torchscript_is_the_bare_module_to_the_byte():
    torch = pytest.importorskip('torch')
    want, policy = recorded('g1_lstm_walk', 'expected_200.npz'), g1_torch()
    got = run(policy, 'x', want['obs'])
    module = torch.jit.load(str(data('g1_lstm_walk', 'motion.pt'))).eval()
    with torch.no_grad():
        bare = np.concatenate([module(torch.from_numpy(o[None])).numpy().copy()
                               for o in want['obs']])
    assert got.tobytes() == bare.tobytes()
    assert policy.b['hidden_state'].tobytes() == module.hidden_state.numpy().tobytes()
    np.testing.assert_allclose(got, want['actions'], atol=1e-5)
    np.testing.assert_allclose(run(policy, 'x', want['obs'], wipe_at=100),
                               want['actions_zeroed_at_100'], atol=1e-5)


def test_p20_g1_torchscript_state_is_found_in_its_graph():
    policy = g1_torch()
    assert set(policy.layout) == {'x', 'actions', 'hidden_state', 'cell_state'}
    before = policy.policy.hidden()
    policy.tick(x=1)
    assert policy.policy.hidden() == before


def test_p1_g1_torchscript_returns_to_the_byte():
    obs = recorded('g1_lstm_walk', 'expected_200.npz')['obs']
    g1_torch().returns([{'x': o[None]} for o in obs[:60]], at=33)


def test_raptor_torchscript_with_a_feedback_pair():
    pytest.importorskip('torch')
    want = recorded('raptor_gru_quadrotor', 'expected_500.npz')
    policy = Live('torch', model=Path('raptor_gru.pt'), state={'h_in': 'h_out'},
                  model_root=data('raptor_gru_quadrotor'),
                  shapes={'obs': (1, 22), 'h_in': (1, 1, 16)},
                  options={'outputs': ['action', 'h_out']})
    np.testing.assert_allclose(run(policy, 'obs', want['obs'], output='action'), want['actions'],
                               atol=2e-6)


def test_go2_needs_its_history_for_five_steps():
    pytest.importorskip('torch')
    want = recorded('go2_himloco_history', 'expected_200.npz')
    policy = Live('torch', model=Path('himloco.pt'), shapes={'obs_history': (1, 270)},
                  model_root=data('go2_himloco_history'))
    assert set(policy.layout) == {'obs_history', 'actions'}

    def walk(clear_at: int | None) -> np.ndarray:
        history, out = np.zeros((6, 45), np.float32), []
        for i, obs in enumerate(want['obs']):
            if i == clear_at:
                history[:] = 0
            history[1:] = history[:-1].copy()
            history[0] = obs
            out.append(policy.tick(obs_history=history.reshape(1, -1))['actions'][0])
        return np.array(out)

    whole, cleared = walk(None), walk(100)
    np.testing.assert_allclose(whole, want['actions'], atol=1e-5)
    np.testing.assert_allclose(cleared, want['actions_hist_cleared_at_100'], atol=1e-5)
    differs = (whole != cleared).any(axis=1)
    assert differs[100:105].all()
    assert not differs[105:].any()
