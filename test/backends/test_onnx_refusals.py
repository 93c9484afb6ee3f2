"""What the onnx backend refuses, by the name of what is wrong."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_ros.backends import load
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal
from test.backends.onnx_models import CELL, save

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
PAIRS = {'h_in': 'h_out'}


def refusal(path: Path, root: Path | None = None, **spec) -> Refusal:
    with pytest.raises(Refusal) as e:
        load('onnx', PolicySpec(model=path, model_root=root or path.parent, **spec))
    return e.value


def graph(*nodes: str) -> str:
    return f'g (float[1,4] x) => (float[1,4] y) {{ {" ".join(nodes)} }}'


@pytest.mark.parametrize('node', [
    'n = RandomNormalLike (x)', 'n = RandomUniformLike <seed = 1.0> (x)', 'n = Bernoulli (x)',
    'n = RandomNormal <shape = [1, 4]> ()', 'n = RandomUniform <shape = [1, 4]> ()',
    'm = Multinomial (x)  n = Cast <to = 1> (m)'])
def test_p20_random_operations_are_refused_by_name(tmp_path, node):
    e = refusal(save(tmp_path, graph(node, 'y = Add (x, n)')))
    assert e.code is Code.UNSUPPORTED
    assert node.split('=')[1].split('<')[0].split('(')[0].strip() in e.message


def test_p20_also_in_a_subgraph(tmp_path):
    body = graph('s = ReduceSum <keepdims = 0> (x)', 'c = Cast <to = 9> (s)',
                 '''y = If (c) <then_branch = a () => (float[1,4] p) { p = RandomNormalLike (x) },
                    else_branch = b () => (float[1,4] q) { q = Identity (x) }>''')
    e = refusal(save(tmp_path, body))
    assert 'RandomNormalLike' in e.message
    assert 'then_branch of If' in e.message


def test_p20_also_in_a_function(tmp_path):
    head = '<ir_version: 8, opset_import: ["": 17, "own": 1]>'
    e = refusal(save(tmp_path, graph('y = own.noisy (x)'), head,
                     '<opset_import: ["": 17], domain: "own"> noisy (a) => (b) '
                     '{ n = RandomNormalLike (a)  b = Add (a, n) }'))
    assert 'RandomNormalLike' in e.message
    assert 'function noisy' in e.message


@pytest.mark.parametrize(('mode', 'refused'), [('bool {1}', True), ('bool {0}', False)])
def test_p20_dropout_is_refused_in_training_mode_only(tmp_path, mode, refused):
    path = save(tmp_path, graph('r = Constant <value = float {0.5}> ()',
                                f't = Constant <value = {mode}> ()', 'y = Dropout (x, r, t)'))
    if refused:
        assert 'Dropout in training mode' in refusal(path).message
    else:
        load('onnx', PolicySpec(model=path, model_root=tmp_path))


def test_p20_dropout_whose_mode_is_an_input_is_refused(tmp_path):
    e = refusal(save(tmp_path, '''g (float[1,4] x, bool t) => (float[1,4] y)
        { r = Constant <value = float {0.5}> ()  y = Dropout (x, r, t) }'''))
    assert 'Dropout' in e.message


def test_p20_state_that_nobody_feeds_back_is_refused_by_name(tmp_path):
    e = refusal(save(tmp_path))
    assert e.code is Code.UNDECLARED_STATE
    assert 'state: {h_in: h_out}' in e.message


def external(folder: Path, location: str = 'w.bin') -> Path:
    """A model with its weights in another file."""
    path = folder / 'model.onnx'
    w = onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32).reshape(1, 4), 'w')
    info = onnx.helper.make_tensor_value_info
    model = onnx.helper.make_model(onnx.helper.make_graph(
        [onnx.helper.make_node('Add', ['x', 'w'], ['y'])], 'g',
        [info('x', 1, [1, 4])], [info('y', 1, [1, 4])], [w]), ir_version=8,
        opset_imports=[onnx.helper.make_opsetid('', 17)])
    onnx.save(model, str(path), save_as_external_data=True, location='w.bin', size_threshold=0)
    if location != 'w.bin':
        model = onnx.load(str(path), load_external_data=False)
        for entry in model.graph.initializer[0].external_data:
            entry.value = location if entry.key == 'location' else entry.value
        path.write_bytes(model.SerializeToString())
    return path


def weights(path: Path) -> str:
    policy, _ = load('onnx', PolicySpec(model=path, model_root=path.parent))
    return policy.identity()[0]['weights']


def test_p8_the_weights_digest_covers_external_data(tmp_path):
    path = external(tmp_path)
    first = weights(path)
    data = bytearray((tmp_path / 'w.bin').read_bytes())
    data[5] ^= 1
    (tmp_path / 'w.bin').write_bytes(data)
    assert weights(path) != first


def test_a_missing_external_file_is_named(tmp_path):
    path = external(tmp_path)
    (tmp_path / 'w.bin').unlink()
    e = refusal(path)
    assert (e.code, 'w.bin' in e.message) == (Code.NOT_FOUND, True)


def test_a_truncated_external_file_is_named_with_its_size(tmp_path):
    path = external(tmp_path)
    (tmp_path / 'w.bin').write_bytes(b'1234567')
    e = refusal(path)
    assert (e.code, 'has 7 bytes' in e.message) == (Code.CORRUPT, True)


@pytest.mark.parametrize('location', ['../w.bin', '/etc/hostname', 'link/w.bin'])
def test_external_data_does_not_lead_outside_the_model_root(tmp_path, location):
    root = tmp_path / 'root'
    root.mkdir()
    (tmp_path / 'w.bin').write_bytes(bytes(16))
    (root / 'link').symlink_to(tmp_path)
    e = refusal(external(root, location))
    assert (e.code, 'outside the model root' in e.message) == (Code.INVALID_POLICY_FILE, True)


def test_paths_of_models_are_checked(tmp_path):
    root = tmp_path / 'root'
    root.mkdir()
    path = save(tmp_path)
    assert 'outside the model root' in refusal(path, root).message
    assert refusal(root / 'absent.onnx').code is Code.NOT_FOUND
    assert 'is a folder' in refusal(root, tmp_path).message
    pointer = root / 'lfs.onnx'
    pointer.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\n')
    assert 'git lfs pull' in refusal(pointer).message
    pointer.write_bytes(b'\xff' * 40)
    assert 'cannot be read as ONNX' in refusal(pointer).message
    assert refusal(pointer, factory='a:b').code is Code.INVALID_POLICY_FILE


@pytest.mark.parametrize(('body', 'spec', 'words'), [
    (CELL.replace('float[1,4] obs', 'float[1,N] obs'), {'state': PAIRS}, 'obs has a dynamic shape '
     '[1, N]'),
    (CELL.replace('float[1,4] obs', 'float[N,4] obs'), {'state': PAIRS, 'shapes': {'obs': (2, 5)}},
     'the model says [N, 4]'),
    (CELL.replace('float[1,4] obs', 'float[N,4] obs'), {'state': PAIRS, 'shapes': {'obx': (1, 4)}},
     'shapes.obx'),
    (CELL, {'state': {'h_in': 'h'}}, "no output 'h'"),
    (CELL, {'state': PAIRS, 'options': {'threads': 1}}, 'options.threads: unknown'),
    (CELL, {'state': PAIRS, 'options': {'intra_op_num_threads': 0}}, 'at least 1'),
    (CELL, {'state': PAIRS, 'options': {'provider': 'CUDAExecutionProvider'}},
     'must be one of CPUExecutionProvider'),
    (CELL, {'state': PAIRS, 'options': {'initial': {'obs': 1}}}, 'only fed back inputs'),
    (CELL, {'state': PAIRS, 'options': {'initial': {'h_in': [1, 2]}}}, 'does not fit'),
    ('g (string[1] s) => (float[1] y) { y = Constant <value = float[1] {1.0}> () }', {},
     'input s has data type STRING'),
    ('g (seq(float[1]) s) => (float[1] y) { i = Constant <value = int64 {0}> () '
     'y = SequenceAt (s, i) }', {}, 'input s is a sequence_type'),
    ('g (float[] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }', {}, 'any rank'),
])
def test_p20_what_cannot_be_served_is_named(tmp_path, body, spec, words):
    assert words in refusal(save(tmp_path, body), **spec).message
