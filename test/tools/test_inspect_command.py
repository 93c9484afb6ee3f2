"""`flashrt-ros inspect` on models of every kind; no TensorRT and no GPU needed."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
import pytest

from flashrt_ros.backends.ports import TensorInfo
from flashrt_ros.backends.tensorrt_api import EngineTensor
from flashrt_ros.backends.tensorrt_plan import note_of, write_engine, write_entry
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest import policy_file
from flashrt_ros.tools.cli import cli
from flashrt_ros.tools.model_report import ModelReport
from test.backends.tensorrt_double import GRU, plan
from test.conformance.small_onnx import write_gru
from test.shared_data import data

TENSORS = tuple(EngineTensor(n, i, tuple(s), {'FLOAT': 'F32', 'INT64': 'I64'}[d])
                for n, i, s, d in GRU)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ['inspect', *(str(a) for a in args)])


def report(*args: object) -> Any:
    result = run(*args, '--json')
    assert result.exit_code == 0, f'{result.output} {result.exception}'
    return json.loads(result.stdout)


def refusal_of(result: Result) -> Refusal:
    assert isinstance(result.exception, Refusal), result.output
    return result.exception


def test_the_real_g1_as_onnx() -> None:
    pytest.importorskip('onnx', reason="onnx is not installed: pip install 'flashrt_ros[onnx]'")
    seen = report(data('g1_lstm_walk', 'g1_lstm.onnx'))
    assert {t['name']: t['shape'] for t in seen['inputs']} == {
        'obs': [1, 47], 'h_in': [1, 1, 64], 'c_in': [1, 1, 64]}
    assert seen['pairs'] == {'h_in': 'h_out', 'c_in': 'c_out'}
    assert seen['remarks'] == []
    text = run(data('g1_lstm_walk', 'g1_lstm.onnx')).output
    assert 'suggested feedback pair: c_in: c_out' in text


def test_a_model_that_a_backend_would_refuse_is_still_shown(tmp_path: Path) -> None:
    onnx = pytest.importorskip('onnx', reason='onnx is not installed')
    h, f = onnx.helper, onnx.TensorProto.FLOAT
    ports = [h.make_tensor_value_info(n, f, ['N', 3]) for n in ('x', 'y')]
    onnx.save(h.make_model(h.make_graph([h.make_node('RandomNormalLike', ['x'], ['y'])], 'g',
                                        ports[:1], ports[1:])), str(tmp_path / 'm.onnx'))
    seen = report(tmp_path / 'm.onnx')
    assert seen['inputs'] == [{'name': 'x', 'dtype': 'F32', 'shape': [-1, 3]}]
    assert 'RandomNormalLike' in seen['remarks'][0]


def test_an_engine_with_a_note_is_shown_without_tensorrt(tmp_path: Path) -> None:
    data_ = plan()
    key = {'source': 'a' * 64, 'arch': 'sm_110', 'precision': 'model'}
    write_engine(tmp_path / 'a.engine', data_, note_of(data_, key, TENSORS, True))
    write_entry(tmp_path / 'b.engine', data_, note_of(data_, key, TENSORS, False))
    for name in ('a.engine', 'b.engine'):
        seen = report(tmp_path / name)
        assert seen['facts']['built by'] == 'TensorRT 10.13.3.9'
        assert seen['facts']['arch'] == 'sm_110'
        assert seen['pairs'] == {'h_in': 'h_out', 'c_in': 'c_out', 't_in': 't_out'}
        assert bool(seen['remarks']) is (name == 'b.engine')    # it says: cannot be captured


def test_a_bare_engine_tells_its_version_and_why_no_more(tmp_path: Path) -> None:
    (tmp_path / 'gru.plan').write_bytes(plan(version=(10, 3, 0, 30)))
    seen = report(tmp_path / 'gru.plan')
    assert seen['facts']['built by'] == 'TensorRT 10.3.0.30'
    assert seen['inputs'] == []
    assert 'cannot be seen here' in seen['remarks'][0]


@pytest.mark.parametrize(('name', 'content', 'code', 'match'), [
    ('x.engine', b'nothing of the kind' * 9, Code.CORRUPT, 'is not a TensorRT engine'),
    ('x.engine', plan(tag=b'vtrt', version=(1, 7, 1, 116))[:-1], Code.CORRUPT, 'its header says'),
    ('x.bin', b'x', Code.INVALID_ARGUMENT, 'known are .onnx, .engine, .plan, .pt'),
    ('x.onnx', b'\xff\xff\xff', Code.BACKEND, 'cannot be read as ONNX'),
])
def test_a_file_that_is_none_is_refused(name: str, content: bytes, code: Code, match: str,
                                        tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refused = refusal_of(run(tmp_path / name))
    assert refused.code is code
    assert match in refused.message


def test_torchscript_and_torch_export(tmp_path: Path) -> None:
    pytest.importorskip('torch', reason="torch is not installed: pip install 'flashrt_ros[torch]'")
    model = data('g1_lstm_walk', 'motion.pt')
    assert '--shape NAME=1x47' in refusal_of(run(model)).message
    seen = report(model, '--shape', 'x=1x47')
    assert {t['name'] for t in seen['state']} == {'hidden_state', 'cell_state'}
    assert seen['outputs'][0]['shape'] == [1, 12]
    raptor = data('raptor_gru_quadrotor', 'raptor_gru.pt')
    seen = report(raptor, '--shape', 'obs=1x22', '--shape', 'h_in=1x1x16')
    assert list(seen['pairs']) == ['h_in']


REPORTS = {
    'plain': ((('obs', (1, 47), 'F32'), ('h_in', (1, 64), 'F32')),
              (('actions', (1, 4, 12), 'F32'), ('h_out', (1, 64), 'F32'))),
    'odd names': ((('yes', (3,), 'F32'), ('0.obs:a', (3,), 'F32')), (('no', (3,), 'F32'),)),
    'picture and words': ((('image', (1, 3, 96, 128), 'F32'), ('rgb_left', (48, 64, 3), 'U8'),
                           ('prompt_tokens', (1, 16), 'I64')), (('actions', (1, 7), 'F32'),)),
    'all fed back': ((('x', (2, 4), 'F32'), ('h', (2, 3), 'F32')), (('h2', (2, 3), 'F32'),)),
}


@pytest.mark.parametrize('name', REPORTS)
def test_the_policy_file_to_start_from_loads_and_fits(name: str, tmp_path: Path) -> None:
    inputs, outputs = ([TensorInfo(*t) for t in side] for side in REPORTS[name])
    made = ModelReport(tmp_path / 'my model.onnx', 'onnx', 'ONNX', tuple(inputs), tuple(outputs))
    (tmp_path / 'my model.onnx').write_bytes(b'x')
    (tmp_path / 'p.yaml').write_text(made.policy_file())
    loaded = policy_file.load(tmp_path / 'p.yaml')
    assert loaded.policy.model == 'my model.onnx'
    assert set(loaded.inputs) == {t.name for t in inputs} - set(dict(made.pairs))
    assert loaded.policy.state == dict(made.pairs)


def test_the_suggested_policy_file_is_taken_by_the_backend(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='onnxruntime is not installed')
    from flashrt_ros import backends
    from flashrt_ros.backends.spec import PolicySpec
    write_gru(tmp_path / 'gru.onnx')
    (tmp_path / 'p.yaml').write_text(report(tmp_path / 'gru.onnx')['policy_file'])
    loaded = policy_file.load(tmp_path / 'p.yaml')
    policy, device = backends.load('onnx', PolicySpec(
        tmp_path / 'gru.onnx', model_root=tmp_path, state=loaded.policy.state))
    policy_file.check_ports(loaded, policy.layout())
    policy.close()
    device.close()
