"""`flashrt-ros build` with NVIDIA's real builder; skips where the wheels are absent."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
import pytest

from flashrt_ros.backends.tensorrt_plan import open_engine
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest import policy_file
from flashrt_ros.tools import build
from flashrt_ros.tools.cli import cli
from test.backends.tensorrt_wheels import real
from test.shared_data import data


@pytest.fixture(autouse=True)
def _library_and_no_card(monkeypatch: Any) -> None:
    pytest.importorskip('onnx', reason="onnx is not installed: pip install 'flashrt_ros[onnx]'")
    if not real().is_rtx:
        pytest.skip('these tests build without a card, which TensorRT-RTX can')

    def none(_: int) -> Any:
        raise Refusal(Code.UNSUPPORTED, 'no card')
    monkeypatch.setattr(build, 'device_arch', none)


def run(*args: object) -> Result:
    """Run the command line; a refusal stays an exception."""
    return CliRunner().invoke(cli, [str(a) for a in ('build', '--library', 'tensorrt_rtx', *args)])


def refusal_of(result: Result) -> Refusal:
    assert isinstance(result.exception, Refusal), result.output
    return result.exception


def test_an_engine_and_the_policy_file_to_start_from(tmp_path: Path) -> None:
    result = run(data('g1_lstm_walk', 'g1_lstm.onnx'), '-o', tmp_path / 'g1.engine', '--cache',
                 tmp_path / 'cache')
    assert result.exit_code == 0, result.output
    assert 'suggested feedback pair: h_in: h_out' in result.stdout
    assert 'TensorRT-RTX' in result.stderr
    file = open_engine(tmp_path / 'g1.engine')
    assert file.note is not None
    assert file.note.key['precision'] == 'model'
    assert [t.name for t in file.note.tensors] == ['obs', 'h_in', 'c_in', 'actions', 'h_out',
                                                   'c_out']
    assert file.read()[:4] == b'vtrt'       # a plan that other tools read, nothing around it
    text = result.stdout[result.stdout.index('policy:\n'):]
    (tmp_path / 'g1.yaml').write_text(text)
    loaded = policy_file.load(tmp_path / 'g1.yaml')
    assert loaded.policy.backend == 'tensorrt'
    assert loaded.policy.model == 'g1.engine'
    assert loaded.policy.state == {'h_in': 'h_out', 'c_in': 'c_out'}


def test_json_for_programs_and_the_cache_a_second_time(tmp_path: Path) -> None:
    args = (data('raptor_gru_quadrotor', 'raptor_gru.onnx'), '--cache', tmp_path, '--json',
            '--arch', 'sm_89', '--workspace-mib', 64)
    first, second = json.loads(run(*args).stdout), json.loads(run(*args).stdout)
    assert first['facts']['from'] == 'this build'
    assert second['facts']['from'] == 'the cache'
    assert second['facts']['sha256'] == first['facts']['sha256']
    assert first['facts']['built for'] == 'sm_89'
    assert first['pairs'] == {'h_in': 'h_out'}
    assert f'"cache": "{tmp_path}"' in first['policy_file']
    assert '"workspace_mib": 64' in first['policy_file']


def test_the_card_of_this_machine_is_what_is_built_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(build, 'device_arch', lambda _: ('sm_120', 'NVIDIA RTX 5090'))
    result = run(data('raptor_gru_quadrotor', 'raptor_gru.onnx'), '--cache', tmp_path, '--json')
    assert json.loads(result.stdout)['facts']['built for'] == 'sm_120'
    monkeypatch.setattr(build, 'device_arch', lambda _: ('sm_90', 'NVIDIA H200'))
    refused = refusal_of(run(data('raptor_gru_quadrotor', 'raptor_gru.onnx'), '--cache', tmp_path))
    assert 'does not run on NVIDIA H200 (compute capability 9.0)' in refused.message


def dynamic(folder: Path) -> Path:
    """Write x[N,3] + h[N,3] -> h2[N,3]."""
    import onnx
    h, f = onnx.helper, onnx.TensorProto.FLOAT
    ports = [h.make_tensor_value_info(n, f, ['N', 3]) for n in ('x', 'h', 'h2')]
    model = h.make_model(h.make_graph([h.make_node('Add', ['x', 'h'], ['h2'])], 'g', ports[:2],
                                      ports[2:]), opset_imports=[h.make_opsetid('', 17)],
                         ir_version=8)
    onnx.save(model, str(folder / 'dynamic.onnx'))
    return folder / 'dynamic.onnx'


def test_open_dimensions_are_given_on_the_command_line(tmp_path: Path) -> None:
    path = dynamic(tmp_path)
    refused = refusal_of(run(path, '--cache', tmp_path / 'cache'))
    assert refused.code is Code.INVALID_POLICY_FILE
    assert 'input x has a dynamic shape [N, 3]' in refused.message
    assert '--shape NAME=1x47' in refused.message
    result = run(path, '--cache', tmp_path / 'cache', '--shape', 'x=2x3')   # N is h's, too
    assert result.exit_code == 0, result.output
    assert 'shapes: {x: [2, 3]}' in result.stdout


@pytest.mark.parametrize('text', ['x', 'x=1xa', '=1x2', 'x=1x0', 'x=-1'])
def test_a_bad_shape_is_wrong_usage(text: str, tmp_path: Path) -> None:
    result = run(dynamic(tmp_path), '--shape', text)
    assert result.exit_code == 2
    assert 'is not NAME=1x3x224' in result.output


def test_what_is_no_model_or_no_engine_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'm.pt').write_bytes(b'PK')
    assert 'is not an ONNX file' in refusal_of(run(tmp_path / 'm.pt')).message
    assert 'does not exist' in refusal_of(run(tmp_path / 'none.onnx')).message
    refused = refusal_of(run(dynamic(tmp_path), '-o', tmp_path / 'x.bin'))
    assert 'an engine is named .engine or .plan' in refused.message
    inside = tmp_path / 'inside'
    inside.mkdir()
    refused = refusal_of(run(dynamic(tmp_path), '--model-root', inside))
    assert 'leads outside the model root' in refused.message
