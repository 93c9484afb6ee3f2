"""The onnx backend on small models: binding, feedback, types, options, identity."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from test.backends.live import Live
from test.backends.onnx_models import CELL, save

onnx = pytest.importorskip('onnx')
ort = pytest.importorskip('onnxruntime')
PAIRS = {'h_in': 'h_out'}


def live(folder: Path, body: str = CELL, **spec) -> Live:
    path = save(folder, body)
    return Live('onnx', model=Path(path.name), model_root=folder, **{'state': PAIRS, **spec})


def bare(path: Path, **feeds) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options,
                                providers=['CPUExecutionProvider']).run(None, feeds)


def test_p22_outputs_are_those_of_the_bare_runtime_to_the_byte(tmp_path):
    policy = live(tmp_path)
    rng, h = np.random.default_rng(1), np.zeros((1, 4), np.float32)
    for _ in range(10):
        obs = rng.normal(size=(1, 4)).astype(np.float32)
        actions, h = bare(tmp_path / 'model.onnx', obs=obs, h_in=h)
        assert policy.tick(obs=obs)['actions'].tobytes() == actions.tobytes()
        assert policy.b['h_in'].tobytes() == h.tobytes()


def test_p1_state_put_back_repeats_the_outputs_to_the_byte(tmp_path):
    rng = np.random.default_rng(2)
    live(tmp_path).returns([{'obs': rng.normal(size=(1, 4))} for _ in range(12)], at=5)


def test_an_output_is_never_bound_onto_the_input_it_feeds(tmp_path):
    # first writes b_out, then reads a_in: bound onto each other they would overwrite
    policy = live(tmp_path, '''g (float[1,4] a_in, float[1,4] b_in, float[1,4] x)
        => (float[1,4] a_out, float[1,4] b_out, float[1,4] actions) {
            a_out = Identity (b_in)  b_out = Identity (a_in)  actions = Add (a_in, x) }''',
                  state={'a_in': 'a_out', 'b_in': 'b_out'})
    policy.b['a_in'][:], policy.b['b_in'][:] = 1, 2
    seen = [float(policy.tick(x=0)['actions'][0, 0]) for _ in range(4)]
    assert seen == [1, 2, 1, 2]


def test_a_failing_run_leaves_state_as_it_was(tmp_path):
    policy = live(tmp_path, '''g (int64[1] i, float[1,4] h_in) => (float[1,4] h_out,
        float[1,4] actions) {
            one = Constant <value = float {1.0}> ()
            h_out = Add (h_in, one)  actions = Gather <axis = 0> (h_out, i) }''')
    policy.tick(i=0)
    before = policy.state()
    with pytest.raises(Refusal, match='ONNX Runtime') as e:
        policy.tick(i=5)
    assert e.value.code is Code.BACKEND
    assert policy.state() == before
    assert policy.tick(i=0)['actions'][0, 0] == 2


def test_p17_a_tick_keeps_every_address(tmp_path):
    policy = live(tmp_path)
    before = {n: b.ptr for n, b in policy.arena.buffers.items()}
    sentinel = policy.b['actions']
    policy.tick(obs=1)
    assert {n: b.array.ctypes.data for n, b in policy.arena.buffers.items()} == before
    assert sentinel.any()  # the runtime wrote into the arena itself


def test_two_live_sets_of_one_policy_do_not_touch_each_other(tmp_path):
    from flashrt_ros.core.arena import Arena
    policy = live(tmp_path)
    other = Arena(policy.device, policy.layout)
    bound = policy.policy.bind(other.buffers, policy.device)
    policy.tick(obs=1)
    before = policy.state()
    other.buffers['obs'].array[:] = 3
    bound.enqueue()
    assert policy.state() == before
    assert other.read('h_in').tobytes() != before['h_in']


@pytest.mark.parametrize(('kind', 'dtype'), [
    ('float', np.float32), ('double', np.float64), ('float16', np.float16), ('int64', np.int64),
    ('int32', np.int32), ('uint8', np.uint8), ('int8', np.int8), ('bool', np.bool_)])
def test_each_type_passes_through(tmp_path, kind, dtype):
    policy = live(tmp_path, f'''g ({kind}[2,3] x, {kind}[3] h_in) => ({kind}[2,3] y,
        {kind}[3] h_out) {{ y = Identity (x)  i = Constant <value = int64[1] {{0}}> ()
            row = Gather <axis = 0> (x, i)  s = Constant <value = int64[1] {{3}}> ()
            h_out = Reshape (row, s) }}''')
    x = np.array([[1, 0, 1], [0, 1, 1]], dtype)
    out = policy.tick(x=x)['y']
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(policy.b['h_in'], x[0])


def test_bfloat16_is_carried_as_bits(tmp_path):
    policy = live(tmp_path, '''g (bfloat16[4] x, bfloat16[4] h_in) => (float[4] y,
        bfloat16[4] h_out) { y = Cast <to = 1> (h_in)  h_out = Identity (x) }''')
    assert policy.layout['x'].dtype == 'BF16'
    policy.tick(x=np.array([0x3F80, 0x4000, 0, 0xC040], np.uint16))
    assert policy.tick(x=0)['y'].tolist() == [1.0, 2.0, 0.0, -3.0]


def test_scalars_have_no_dimensions(tmp_path):
    policy = live(tmp_path, '''g (float x, float n_in) => (float y, float n_out) {
        y = Mul (x, n_in)  one = Constant <value = float {1.0}> ()  n_out = Add (n_in, one) }''',
                  state={'n_in': 'n_out'})
    assert policy.layout['x'].shape == ()
    assert [float(policy.tick(x=10)['y']) for _ in range(3)] == [0, 10, 20]


def test_odd_names_are_made_into_buffer_names(tmp_path):
    path = save(tmp_path)
    model = onnx.load(str(path))
    for node in model.graph.node:
        node.output[:] = ['/actor/out 0' if n == 'actions' else n for n in node.output]
    model.graph.output[0].name = '/actor/out 0'
    onnx.save(model, str(path))
    policy = Live('onnx', model=path, model_root=tmp_path, state=PAIRS)
    assert [s.name for s in policy.layout.select(Role.OUTPUT)] == ['actor/out_0']
    assert policy.tick(obs=1)['actor/out_0'].any()


DYNAMIC = CELL.replace('[1,4] obs', '[N,4] obs').replace('[1,4] h_in', '[N,4] h_in').replace(
    '[1,4] actions', '[N,4] actions').replace('[1,4] h_out', '[M,4] h_out')


def test_dynamic_dimensions_are_fixed_by_shapes(tmp_path):
    policy = live(tmp_path, DYNAMIC, shapes={'obs': (2, 4)})
    assert {s.shape for s in policy.layout.values()} == {(2, 4)}
    policy.tick(obs=1)


def test_a_first_value_of_state_comes_from_option_or_initializer(tmp_path):
    policy = live(tmp_path, options={'initial': {'h_in': 0.5}})
    assert (policy.b['h_in'] == 0.5).all()
    body = CELL.replace('float[1,4] h_in)', 'float[1,4] h_in = {1, 2, 3, 4})')
    policy = live(tmp_path, body)
    assert policy.b['h_in'].tolist() == [[1, 2, 3, 4]]
    policy.tick(obs=1)
    assert policy.b['h_in'].tolist() != [[1, 2, 3, 4]]
    # the same input without a pair is a constant of the model, not a port
    policy = Live('onnx', model=Path('model.onnx'), model_root=tmp_path,
                  options={'publish': ['h_out']})
    assert set(policy.layout) == {'obs', 'actions', 'h_out'}


def test_ranges_are_what_seeded_inputs_are_drawn_from(tmp_path):
    spec = live(tmp_path, options={'ranges': {'obs': [-2, 3]}}).layout['obs']
    assert (spec.low, spec.high) == (-2.0, 3.0)
    assert live(tmp_path).layout['obs'].low is None


def test_hidden_does_not_change_by_ticks(tmp_path):
    policy = live(tmp_path)
    before = policy.policy.hidden()
    policy.tick(obs=1)
    assert policy.policy.hidden() == before


def test_the_identity_tells_meaning_from_exactness(tmp_path):
    def fields(**spec):
        return live(tmp_path, **spec).policy.identity()
    meaning, exactness = fields()
    assert exactness['onnxruntime'] == ort.__version__
    assert (exactness['provider'], exactness['intra_op_num_threads']) == (
        'CPUExecutionProvider', '1')
    other = fields(options={'graph_optimization_level': 'disable', 'intra_op_num_threads': 2})
    assert other[0] == meaning
    assert other[1] != exactness
    assert fields(options={'initial': {'h_in': 1}})[0] != meaning
    assert fields(options={'ranges': {'obs': [0, 1]}}) == (meaning, exactness)


def test_p8_any_byte_of_the_file_is_part_of_the_weights(tmp_path):
    first = live(tmp_path).policy.identity()[0]['weights']
    path = tmp_path / 'model.onnx'
    model = onnx.load(str(path))
    model.doc_string = 'another note'
    onnx.save(model, str(path))
    second = Live('onnx', model=path, model_root=tmp_path, state=PAIRS)
    assert second.policy.identity()[0]['weights'] != first
