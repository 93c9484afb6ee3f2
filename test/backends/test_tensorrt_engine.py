"""Loading an engine: which file, which library, which card; every refusal names what is wrong."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_engine import check_device, load
from flashrt_ros.backends.tensorrt_plan import note_of, write_engine
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from test.backends.cudart_double import Cudart, Error
from test.backends.tensorrt_double import GRU, STATE, Context, Trt, plan


def opened(folder: Path, data: bytes | None = None, *, name: str = 'gru.engine',
           rt: Cudart | None = None, library: str = 'tensorrt', state: Any = STATE,
           **spec: Any) -> Any:
    """Write an engine and load it on the doubles; return (policy, device)."""
    rt = rt or Cudart()
    trt = Trt(rt, library, '1.7.1.116' if library == 'tensorrt_rtx' else '10.13.3.9')
    if data is not None:
        (folder / name).write_bytes(data)
    return load(PolicySpec(Path(name), model_root=folder, state=state, **spec),
                library=trt.library(),
                device_of=lambda ordinal, wait: CudaDevice(ordinal, wait=wait, rt=rt))


def refused(code: Code, match: str, *args: Any, **kw: Any) -> None:
    with pytest.raises(Refusal, match=match) as error:
        opened(*args, **kw)
    assert error.value.code is code


def changed(name: str, shape: Any = None, dtype: str | None = None) -> Any:
    """Return the double's tensors with one of them changed."""
    return [[n, i, shape if n == name and shape is not None else s,
             dtype if n == name and dtype else d] for n, i, s, d in GRU]


def test_the_layout_is_ports_and_one_state_buffer_per_pair(tmp_path: Path) -> None:
    policy, device = opened(tmp_path, plan())
    roles = {n: s.role for n, s in policy.layout().items()}
    assert roles == {'obs': Role.INPUT, 'h_in': Role.STATE, 'c_in': Role.STATE,
                     't_in': Role.STATE, 'actions': Role.OUTPUT}
    assert policy.layout()['t_in'].shape == ()      # a scalar int64, no batch dimension
    assert policy.layout()['t_in'].dtype == 'I64'
    meaning, exactness = policy.identity()
    assert exactness['tensorrt'] == 'TensorRT 10.13.3.9'
    assert meaning['weights'] == exactness['engine']
    device.close()


def test_an_engine_for_another_card_is_recognised_from_its_note(tmp_path: Path) -> None:
    for arch in ('sm_89', 'portable', 'sm_110'):    # the double is an sm_89
        data = plan()
        write_engine(tmp_path / 'gru.engine', data, note_of(data, {'arch': arch}, (), True))
        if arch == 'sm_110':
            refused(Code.UNSUPPORTED, 'gru.engine was built for sm_110, double is sm_89', tmp_path)
        else:
            opened(tmp_path)[1].close()


def test_what_tensorrt_warns_of_is_passed_on(tmp_path: Path, caplog: Any) -> None:
    opened(tmp_path, plan(warn='Using an engine plan file across different models of devices'))
    assert 'different models of devices' in caplog.text


def test_odd_names_and_types_that_numpy_lacks(tmp_path: Path) -> None:
    tensors = [['/in 1', True, [2], 'BF16'], ['::out[0]', False, [2], 'FP8']]
    policy, device = opened(tmp_path, plan(tensors), state={})
    assert {n: s.dtype for n, s in policy.layout().items()} == {'in_1': 'BF16',
                                                                'out_0_': 'F8_E4M3'}
    device.close()


def test_p8_a_note_beside_the_engine_keeps_the_meaning_when_it_is_built_again(tmp_path: Path
                                                                              ) -> None:
    identities = []
    for attempt in ('first', 'second'):
        data = plan(attempt=attempt)
        write_engine(tmp_path / 'gru.engine', data, note_of(
            data, {'source': 'f' * 64, 'precision': 'tf32'}, (), True))
        policy, device = opened(tmp_path)
        identities.append(policy.identity())
        device.close()
    (meaning_a, exact_a), (meaning_b, exact_b) = identities
    assert meaning_a == meaning_b
    assert meaning_a['weights'] == 'f' * 64
    assert exact_a['engine'] != exact_b['engine']
    assert exact_a['precision'] == 'tf32'


def test_a_note_of_another_engine_is_not_believed(tmp_path: Path) -> None:
    data = plan()
    write_engine(tmp_path / 'gru.engine', plan(attempt='x'), note_of(data, {'source': 'f' * 64},
                                                                     (), True))
    policy, device = opened(tmp_path)
    assert policy.identity()[0]['weights'] != 'f' * 64
    device.close()


@pytest.mark.parametrize(('data', 'code', 'match'), [
    (b'', Code.CORRUPT, 'not a TensorRT engine'),
    (b'not an engine at all, whatever its name says' * 9, Code.CORRUPT, 'not a TensorRT engine'),
    (b'version https://git-lfs.github.com/spec/v1', Code.CORRUPT, 'Git LFS pointer'),
    (plan()[:40], Code.UNSUPPORTED, 'broken plan'),
    (plan(version=(10, 3, 0, 30)), Code.UNSUPPORTED,
     r'built by TensorRT 10\.3\.0\.30, expected TensorRT 10\.13\.3\.9'),
    (plan(tag=b'vtrt', version=(1, 7, 1, 116)), Code.UNSUPPORTED,
     r'built by TensorRT-RTX 1\.7\.1\.116, expected TensorRT 10'),
    (plan(plugin='Acme'), Code.UNSUPPORTED, 'Cannot find plugin: Acme'),
    (plan(weights=1 << 40), Code.NO_MEMORY, 'OutOfMemory'),
    (plan(changed('obs', dtype='INT4')), Code.UNSUPPORTED, 'input obs has type INT4'),
    (plan(host=['t_in']), Code.UNSUPPORTED, 't_in decides the shape'),
    (plan(hwc8=['obs']), Code.UNSUPPORTED, "obs is stored as 'Channel major"),
    (plan(alias={'h_out': 'h_in'}), Code.UNSUPPORTED, 'h_out must share the memory of input h_in'),
    (plan(changed('obs', [-1, 6])), Code.INVALID_POLICY_FILE, r'policy.shapes: \{obs: '),
    (plan(changed('h_out', [1, 1, 9])), Code.INVALID_POLICY_FILE, 'h_in.*equal type and shape'),
    (plan(changed('h_out', dtype='HALF')), Code.INVALID_POLICY_FILE, 'F16.*equal type and shape'),
])
def test_a_bad_engine_is_refused_by_name(data: bytes, code: Code, match: str, tmp_path: Path
                                         ) -> None:
    rt = Cudart()
    refused(code, match, tmp_path, data, rt=rt)
    assert rt.blocks == {}


@pytest.mark.parametrize('cut', [63, 64, 200, -1])
def test_a_cut_rtx_engine_is_recognised_from_its_header(cut: int, tmp_path: Path) -> None:
    rt = Cudart()
    data = plan(tag=b'vtrt', version=(1, 7, 1, 116))
    refused(Code.CORRUPT, 'its header says', tmp_path, data[:cut], library='tensorrt_rtx', rt=rt)
    refused(Code.CORRUPT, 'its header says', tmp_path, data + b'x', library='tensorrt_rtx', rt=rt)
    assert 'cudaGetDeviceCount' not in rt.log, 'the card was asked before the header'


def test_a_data_dependent_output_is_refused_by_name(tmp_path: Path) -> None:
    tensors = changed('actions', [-1, 4])
    refused(Code.UNSUPPORTED, 'output actions has shape', tmp_path, plan(tensors, data=True))


@pytest.mark.parametrize(('spec', 'match'), [
    ({'shapes': {'nobody': (1, 6)}}, 'policy.shapes.nobody.*obs, h_in'),
    ({'shapes': {'obs': (2, 6)}}, r'policy.shapes.obs: \[2, 6\] does not fit'),
    ({'state': {'h_in': 'nobody'}}, "policy.state.h_in: the model has no output 'nobody'"),
    ({'state': {'nobody': 'h_out'}}, "policy.state.nobody: the model has no input 'nobody'"),
    ({'options': {'precison': 'fp16'}}, 'did you mean precision'),
    ({'options': {'library': 'tensorrtx'}}, 'policy.options.library'),
    ({'options': {'initial': {'obs': 1}}}, 'policy.options.initial.obs'),
    ({'options': {'initial': {'h_in': [1, 2, 3]}}}, 'policy.options.initial.h_in: does not fit'),
    ({'factory': 'module:function'}, 'policy.factory'),
])
def test_a_bad_policy_file_is_refused_by_path(spec: Any, match: str, tmp_path: Path) -> None:
    refused(Code.INVALID_POLICY_FILE, match, tmp_path, plan(), **spec)


def test_state_that_nothing_feeds_is_refused_by_name(tmp_path: Path) -> None:
    refused(Code.UNDECLARED_STATE, 'h_in.*h_out', tmp_path, plan(),
            state={k: v for k, v in STATE.items() if k != 'h_in'})


def test_first_values_of_state_come_from_the_options(tmp_path: Path) -> None:
    policy, device = opened(tmp_path, plan(), options={'initial': {'h_in': 0.5, 't_in': 3}})
    np.testing.assert_array_equal(policy.initial()['h_in'], np.full((1, 1, 8), 0.5, 'f4'))
    assert policy.initial()['t_in'].dtype == np.int64
    device.close()


def test_models_lie_below_the_model_root(tmp_path: Path) -> None:
    (tmp_path / 'root').mkdir()
    (tmp_path / 'gru.engine').write_bytes(plan())
    refused(Code.INVALID_POLICY_FILE, 'outside the model root', tmp_path / 'root',
            name='../gru.engine')
    refused(Code.NOT_FOUND, 'does not exist', tmp_path, name='other.engine')
    (tmp_path / 'gru.trt').write_bytes(plan())
    refused(Code.INVALID_POLICY_FILE, r'not \.onnx, \.engine or \.plan', tmp_path, name='gru.trt')


def test_an_h200_is_refused_by_tensorrt_rtx_before_anything_is_built(tmp_path: Path) -> None:
    rt = Cudart(9, 0, 'NVIDIA H200')
    (tmp_path / 'gru.onnx').write_bytes(b'never read')
    refused(Code.UNSUPPORTED, r'TensorRT-RTX 1\.7\.1\.116 does not run on NVIDIA H200 \(compute '
            r'capability 9\.0\); it runs on 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1\. Use the full '
            r'TensorRT .* or backend: torch or onnx', tmp_path, name='gru.onnx', rt=rt,
            library='tensorrt_rtx', state={})
    assert 'cudaStreamDestroy' in rt.log, 'the device was left open'


def test_the_full_library_is_asked_about_any_card() -> None:
    trt = Trt(Cudart()).library()
    check_device(trt, 'sm_90', 'NVIDIA H200')
    rtx = Trt(Cudart(), 'tensorrt_rtx', '1.7.1.116').library()
    check_device(rtx, 'sm_130', 'a card of the future')
    with pytest.raises(Refusal, match='8\\.7'):
        check_device(rtx, 'sm_87', 'Orin')


def test_no_driver_is_named(tmp_path: Path) -> None:
    rt = Cudart()
    rt.cudaGetDeviceCount = lambda: (Error.cudaErrorInsufficientDriver, 0)  # type: ignore
    refused(Code.UNSUPPORTED, r'no usable NVIDIA driver or card \(cudaGetDeviceCount failed: '
            'cudaErrorInsufficientDriver', tmp_path, plan(), rt=rt)


def test_a_policy_on_another_device_or_after_close_is_refused(tmp_path: Path) -> None:
    policy, device = opened(tmp_path, plan())
    with pytest.raises(Refusal, match='CUDA device, not on host'):
        policy.bind({}, HostDevice())
    policy.close()
    with pytest.raises(Refusal, match='closed'):
        policy.bind({}, device)
    device.close()


def test_shapes_that_do_not_fit_together_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    def infer_shapes(self: Context) -> list[str]:
        self._error('dimensions do not agree')
        raise RuntimeError('infer_shapes')  # what the bindings make of -1

    monkeypatch.setattr(Context, 'infer_shapes', infer_shapes)
    tensors = [[n, i, [-1, *s[1:]] if s else s, d] for n, i, s, d in GRU]
    refused(Code.INVALID_POLICY_FILE, 'shapes do not fit together.*dimensions do not agree',
            tmp_path, plan(tensors, open=True),
            shapes={n: (1, *s[1:]) for n, i, s, _ in GRU if i and s})
