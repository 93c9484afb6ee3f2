"""NVIDIA's own parser and builder on real policies and on models that must be refused.

Needs the TensorRT-RTX wheels (or a full TensorRT), no GPU: an engine is built and looked at, not
run.
"""
from __future__ import annotations

import dataclasses
import os
from pathlib import Path
import signal
from typing import Any

import numpy as np
import pytest

from flashrt_ros.backends.ports import suggest_pairs
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_api import Library
from flashrt_ros.backends.tensorrt_build import BuildOptions, _config, build, parse
from flashrt_ros.backends.tensorrt_engine import OPTIONS, deserialise, engine_of_onnx
from flashrt_ros.backends.tensorrt_plan import HEADER, check_plan, plan_header, same_version
from flashrt_ros.core.errors import Code, Refusal
from test.backends.tensorrt_wheels import real
from test.shared_data import data

onnx = pytest.importorskip('onnx', reason="onnx is not installed: pip install 'flashrt_ros[onnx]'")

POLICIES = {
    'g1_lstm_walk/g1_lstm.onnx': (
        {'obs': (1, 47), 'h_in': (1, 1, 64), 'c_in': (1, 1, 64)},
        {'actions': (1, 12), 'h_out': (1, 1, 64), 'c_out': (1, 1, 64)},
        [('h_in', 'h_out'), ('c_in', 'c_out')]),
    'raptor_gru_quadrotor/raptor_gru.onnx': (
        {'obs': (1, 22), 'h_in': (1, 1, 16)}, {'action': (1, 4), 'h_out': (1, 1, 16)},
        [('h_in', 'h_out')]),
    'pickplace_gru_chunk4/pickplace_gru_chunk4.onnx': (
        {'obs': (1, 40), 'h_in': (1, 1, 96)}, {'actions': (1, 4, 4), 'h_out': (1, 1, 96)},
        [('h_in', 'h_out')]),
}


@pytest.fixture(scope='module')
def library() -> Library:
    return real()


def graph(folder: Path, nodes: Any, inputs: Any, outputs: Any, weights: Any = (), opset: int = 17,
          domains: Any = (), **save: Any) -> Path:
    """Write an ONNX file; ports as {name: (type, shape)}."""
    h, types = onnx.helper, onnx.TensorProto
    ports = [[h.make_tensor_value_info(n, getattr(types, t), s) for n, (t, s) in p.items()]
             for p in (inputs, outputs)]
    g = h.make_graph(nodes, 'g', *ports, [onnx.numpy_helper.from_array(v, n) for n, v in weights])
    opsets = [h.make_opsetid('', opset), *(h.make_opsetid(d, 1) for d in domains)]
    path = folder / 'model.onnx'
    onnx.save_model(h.make_model(g, opset_imports=opsets, ir_version=8), str(path), **save)
    return path


def node(op: str, *names: Any, **attributes: Any) -> Any:
    """Return a node `op(inputs) -> outputs`."""
    inputs, outputs = names
    return onnx.helper.make_node(op, inputs.split(), outputs.split(), **attributes)


@pytest.mark.parametrize('path', POLICIES)
def test_real_policies_build_and_look_as_they_should(path: str, library: Library) -> None:
    inputs, outputs, pairs = POLICIES[path]
    built = build(library, data(*path.split('/')), BuildOptions())
    assert {t.name: t.shape for t in built.tensors if t.is_input} == inputs
    assert {t.name: t.shape for t in built.tensors if not t.is_input} == outputs
    assert {t.dtype for t in built.tensors} == {'F32'}
    assert suggest_pairs([t.info for t in built.tensors if t.is_input],
                         [t.info for t in built.tensors if not t.is_input]) == pairs
    assert built.capturable
    header = plan_header(built.plan[:HEADER])
    assert header is not None
    assert header.library == library.name
    assert same_version(header, library)
    check_plan(Path(path), len(built.plan), header, library)


def test_the_demo_s_own_policy_builds(library: Library) -> None:
    models = sorted((Path(__file__).parents[2] / 'flashrt_ros' / 'demo').glob('**/*.onnx'))
    if not models:
        pytest.skip('the demo has no ONNX policy in this checkout')
    for path in models:
        built = build(library, path, BuildOptions())
        inputs = [t.info for t in built.tensors if t.is_input]
        assert suggest_pairs(inputs, [t.info for t in built.tensors if not t.is_input])
        assert built.capturable


def test_the_length_in_the_header_of_a_real_plan_tells_a_cut_one(library: Library) -> None:
    plan = build(library, data('raptor_gru_quadrotor', 'raptor_gru.onnx'), BuildOptions()).plan
    for size in (HEADER, len(plan) - 1):
        with pytest.raises(Refusal, match='its header says'):
            check_plan(Path('x'), size, plan_header(plan[:HEADER]), library)


def test_the_cache_serves_a_real_policy_and_rebuilds_for_another_card(
        library: Library, tmp_path: Path) -> None:
    path = data('raptor_gru_quadrotor', 'raptor_gru.onnx')
    spec = PolicySpec(path, model_root=path.parent)
    given = {**{k: o.default for k, o in OPTIONS.items()}, 'cache': str(tmp_path)}
    first = engine_of_onnx(library, path, spec, given, 'sm_89')
    again = engine_of_onnx(library, path, spec, given, 'sm_89')
    other = engine_of_onnx(library, path, spec, given, 'sm_120')
    assert (first.fresh, again.fresh, other.fresh) == (True, False, True)
    assert again.plan == first.plan
    assert first.note.key['source'] == other.note.key['source']
    assert len(list(tmp_path.iterdir())) == 2


def test_external_data_is_part_of_the_key_and_missing_data_is_named(library: Library,
                                                                    tmp_path: Path) -> None:
    path = graph(tmp_path, [node('MatMul', 'x w', 'y')], {'x': ('FLOAT', [1, 4])},
                 {'y': ('FLOAT', [1, 3])}, [('w', np.ones((4, 3), 'f4'))],
                 save_as_external_data=True, location='w.bin', size_threshold=0)
    spec = PolicySpec(path, model_root=tmp_path)
    given = {**{k: o.default for k, o in OPTIONS.items()}, 'cache': str(tmp_path / 'cache')}
    key = engine_of_onnx(library, path, spec, given, 'sm_89').note.key
    weights = bytearray((tmp_path / 'w.bin').read_bytes())
    weights[0] ^= 1
    (tmp_path / 'w.bin').write_bytes(weights)
    again = engine_of_onnx(library, path, spec, given, 'sm_89')
    assert again.fresh
    assert again.note.key['source'] != key['source']
    (tmp_path / 'w.bin').unlink()
    with pytest.raises(Refusal, match=r'w\.bin') as refused:
        engine_of_onnx(library, path, spec, given, 'sm_89')
    assert refused.value.code is Code.NOT_FOUND
    with pytest.raises(Refusal, match=r'w\.bin') as refused:    # the parser's own complaint
        parse(library, path)
    assert refused.value.code is Code.NOT_FOUND


def test_open_dimensions_need_a_value_and_get_it(library: Library, tmp_path: Path) -> None:
    path = graph(tmp_path, [node('Add', 'x h', 'h2')],
                 {'x': ('FLOAT', ['N', 3]), 'h': ('FLOAT', ['N', 3])},
                 {'h2': ('FLOAT', ['N', 3])})
    with pytest.raises(Refusal, match=r'dimension N has no value: write policy.shapes: \{x: '
                       r'\[1, 3\]\}'):
        build(library, path, BuildOptions())
    with pytest.raises(Refusal, match=r'policy.shapes.x: \[2, 4\] does not fit'):
        build(library, path, BuildOptions(shapes={'x': (2, 4)}))
    with pytest.raises(Refusal, match=r'policy\.shapes\.z: the model has no such input'):
        build(library, path, BuildOptions(shapes={'z': (2, 3)}))
    built = build(library, path, BuildOptions(shapes={'x': (2, 3), 'h': (2, 3)}))
    assert {t.shape for t in built.tensors} == {(2, 3)}


def test_scalars_odd_names_and_narrow_types_build(library: Library, tmp_path: Path) -> None:
    path = graph(tmp_path, [node('Add', 't one', 't2'), node('Cast', 't', 'f', to=1),
                            onnx.helper.make_node('Mul', ['/x 1', 'f'], ['::y[0]'])],
                 {'/x 1': ('FLOAT', [4]), 't': ('INT64', [])},
                 {'::y[0]': ('FLOAT', [4]), 't2': ('INT64', [])}, [('one', np.array(1, 'i8'))])
    built = build(library, path, BuildOptions())
    assert {t.name: (t.shape, t.dtype) for t in built.tensors} == {
        '/x 1': ((4,), 'F32'), 't': ((), 'I64'), '::y[0]': ((4,), 'F32'), 't2': ((), 'I64')}
    assert [t.info.name for t in built.tensors] == ['x_1', 't', 'y_0_', 't2']
    for onnx_type, name in (('BFLOAT16', 'BF16'), ('FLOAT8E4M3FN', 'F8_E4M3'), ('BOOL', 'BOOL')):
        path = graph(tmp_path, [node('Identity', 'x', 'y')], {'x': (onnx_type, [4])},
                     {'y': (onnx_type, [4])}, opset=19)
        assert {t.dtype for t in build(library, path, BuildOptions()).tensors} == {name}


def test_the_options_reach_the_builder(library: Library) -> None:
    trt = library.module
    builder = trt.Builder(library.logger)

    def configured(capturable: bool = True, **given: Any) -> Any:
        return _config(library, builder, BuildOptions(**given), capturable)
    plain = configured()
    assert not plain.get_flag(trt.BuilderFlag.TF32), 'TF32 is on by default and must be asked for'
    assert plain.builder_optimization_level == 3
    assert configured(precision='tf32').get_flag(trt.BuilderFlag.TF32)
    assert configured(optimization_level=1).builder_optimization_level == 1
    pool = trt.MemoryPoolType.WORKSPACE
    assert configured(workspace_mib=64).get_memory_pool_limit(pool) == 64 << 20
    if library.is_rtx:
        assert plain.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        assert not configured(False).get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        assert plain.num_compute_capabilities == 0
        ampere = configured(arch='sm_86')
        assert ampere.get_compute_capability(0) == trt.ComputeCapability.SM86


def test_a_missing_plugin_is_named(library: Library, tmp_path: Path) -> None:
    path = graph(tmp_path, [node('MyOp', 'x', 'y', name='n7', domain='acme')],
                 {'x': ('FLOAT', [4])}, {'y': ('FLOAT', [4])}, domains=['acme'])
    with pytest.raises(Refusal, match=r"no operation or plugin 'MyOp' \(node n7\)") as refused:
        build(library, path, BuildOptions())
    assert refused.value.code is Code.UNSUPPORTED


def test_hidden_random_numbers_are_refused_by_name(library: Library, tmp_path: Path) -> None:
    path = graph(tmp_path, [node('RandomNormalLike', 'x', 'n', name='noise'),
                            node('Add', 'x n', 'y')],
                 {'x': ('FLOAT', [4])}, {'y': ('FLOAT', [4])})
    with pytest.raises(Refusal, match=r'noise draws random numbers \(RANDOM_NORMAL\)') as refused:
        build(library, path, BuildOptions())
    assert refused.value.code is Code.UNDECLARED_STATE


def test_an_input_that_decides_shapes_is_refused_by_name(library: Library, tmp_path: Path
                                                         ) -> None:
    path = graph(tmp_path, [node('Expand', 'x s', 'y')],
                 {'x': ('FLOAT', [1]), 's': ('INT64', [1])}, {'y': ('FLOAT', ['K'])})
    with pytest.raises(Refusal, match='input s decides the shape'):
        build(library, path, BuildOptions())


def test_a_model_that_needs_memory_while_it_runs_is_built_without_capture(
        library: Library, monkeypatch: Any) -> None:
    if not library.is_rtx:
        pytest.skip('only TensorRT-RTX tells so when it builds')
    original, flag = parse, library.module.BuilderFlag.REQUIRE_USER_ALLOCATION

    class Unwilling:
        def __init__(self, builder: Any) -> None:
            self.create_builder_config = builder.create_builder_config
            self.asked: list[bool] = []
            self.builder = builder

        def build_serialized_network(self, network: Any, config: Any) -> Any:
            self.asked.append(config.get_flag(flag))
            return None if self.asked[-1] else self.builder.build_serialized_network(network,
                                                                                     config)
    built: list[Unwilling] = []

    def parsed(*args: Any, **kw: Any) -> Any:
        p = original(*args, **kw)
        built.append(Unwilling(p.builder))
        return dataclasses.replace(p, builder=built[-1])
    monkeypatch.setattr('flashrt_ros.backends.tensorrt_build.parse', parsed)
    model = data('raptor_gru_quadrotor', 'raptor_gru.onnx')
    assert not build(library, model, BuildOptions()).capturable
    assert built[0].asked == [True, False]


@pytest.mark.parametrize('content', [b'', b'hello', b'\x08\x07' * 50])
def test_a_file_that_is_no_model_is_refused(content: bytes, library: Library, tmp_path: Path
                                            ) -> None:
    (tmp_path / 'model.onnx').write_bytes(content)
    with pytest.raises(Refusal, match=r'not a.* ONNX model') as refused:
        build(library, tmp_path / 'model.onnx', BuildOptions())
    assert refused.value.code is Code.CORRUPT


def test_types_that_tensorrt_lacks_are_named(library: Library, tmp_path: Path) -> None:
    path = graph(tmp_path, [node('Identity', 'x', 'y')], {'x': ('UINT32', [4])},
                 {'y': ('UINT32', [4])})
    given = {k: o.default for k, o in OPTIONS.items()}
    with pytest.raises(Refusal, match='x has type U32, which TensorRT lacks'):
        engine_of_onnx(library, path, PolicySpec(path, model_root=tmp_path), given, 'sm_89')


def test_what_only_the_full_library_offers_is_refused_by_name(library: Library) -> None:
    if not library.is_rtx:
        pytest.skip('the full TensorRT has half precision')
    model = data('raptor_gru_quadrotor', 'raptor_gru.onnx')
    with pytest.raises(Refusal, match=r'precision fp16: TensorRT-RTX .* takes all types from'):
        build(library, model, BuildOptions('fp16'))
    with pytest.raises(Refusal, match='cannot build for sm_90; it knows sm_75, sm_80'):
        build(library, model, BuildOptions(arch='sm_90'))
    with pytest.raises(Refusal, match="precision 'int3' is not one of"):
        build(library, model, BuildOptions('int3'))


class Progress:
    """Keeps what it is told; `at` is called when the named phase starts."""

    def __init__(self, at: Any = None) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []
        self.at = at

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        assert parent is None or parent in self.open
        self.open.append(phase)
        self.seen.append(phase)
        if self.at is not None:
            self.at()

    def step(self, phase: str, step: int) -> None:
        assert phase in self.open

    def finish(self, phase: str) -> None:
        self.open.remove(phase)


def test_a_build_tells_its_progress(library: Library) -> None:
    progress = Progress()
    build(library, data('raptor_gru_quadrotor', 'raptor_gru.onnx'), BuildOptions(),
          progress)
    assert 'Building engine' in progress.seen
    assert progress.open == []


def test_ctrl_c_ends_a_build(library: Library) -> None:
    model = data('raptor_gru_quadrotor', 'raptor_gru.onnx')
    progress = Progress(lambda: os.kill(os.getpid(), signal.SIGINT))
    # a shell starts what it runs in the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(library, model, BuildOptions(), progress)
    finally:
        signal.signal(signal.SIGINT, before)


def test_progress_that_raises_does_not_end_a_build(library: Library) -> None:
    def fail() -> None:
        raise ValueError('a broken display')
    assert build(library, data('raptor_gru_quadrotor', 'raptor_gru.onnx'), BuildOptions(),
                 Progress(fail)).plan


def test_loading_without_a_driver_says_so(library: Library) -> None:
    if Path('/dev/nvidiactl').exists() or Path('/dev/nvhost-gpu').exists():
        pytest.skip('this machine has an NVIDIA driver')
    plan = build(library, data('raptor_gru_quadrotor', 'raptor_gru.onnx'), BuildOptions()).plan
    with pytest.raises(Refusal, match='no usable NVIDIA driver') as refused:
        deserialise(library, plan, 'raptor')
    assert refused.value.code is Code.UNSUPPORTED
