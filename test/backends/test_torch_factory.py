"""Python factories on the torch backend: declared state works, undeclared state is named."""
from __future__ import annotations

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from test.backends.live import Live

torch = pytest.importorskip('torch')
OWN = 'test.backends.own_modules'


def live(factory: str, **spec) -> Live:
    spec = {'shapes': {'obs': (1, 4)}, 'modules': (OWN,), **spec}
    return Live('torch', factory=f'{OWN}:{factory}', **spec)


def refusal(factory: str, **spec) -> Refusal:
    with pytest.raises(Refusal) as e:
        live(factory, **spec)
    return e.value


def xs(n: int = 10, seed: int = 1) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{'obs': rng.normal(size=(1, 4)).astype(np.float32)} for _ in range(n)]


def states(policy: Live) -> set[str]:
    return {s.name for s in policy.layout.select(Role.STATE)}


WORKING = {
    'cell': {'h'}, 'in_place': {'h', 'n', 'table'}, 'swap': {'a', 'b'},
    'queue': {'queue', 'queue.count', 'last', 'last.valid'},
    'previous_declared': {'last', 'last.valid'}, 'keeps': {'last', 'last.valid'},
}
WINDOW = {'declare': {'window': {'kind': 'deque', 'dtype': 'F32', 'shape': [1, 4], 'length': 3},
                      'count': {'kind': 'int'}}}
ENSEMBLE = {'declare': {
    'ensembler.actions': {'kind': 'rows', 'dtype': 'F32', 'shape': [1, 3, 4], 'axis': 1},
    'ensembler.weight': {'kind': 'rows', 'dtype': 'F32', 'shape': [3, 1]}}}
OWN_GENERATOR = {'source': 'own', 'declare': {'own': {'kind': 'generator'}}}
MORE = {'window': WINDOW, 'ensembled': ENSEMBLE, 'noisy': OWN_GENERATOR}


@pytest.mark.parametrize(('factory', 'options'), [*((f, {}) for f in WORKING), *MORE.items()])
def test_p22_outputs_are_those_of_the_bare_module_to_the_byte(factory, options):
    from test.backends import own_modules
    policy = live(factory, options=options)
    arguments = {k: v for k, v in options.items() if k != 'declare'}
    bare = getattr(own_modules, factory)(**arguments)
    for x in xs():
        with torch.no_grad():
            call = bare if isinstance(bare, torch.nn.Module) else bare.tick
            want = call(torch.from_numpy(x['obs']))
        want = want['actions'] if isinstance(want, dict) else want
        assert policy.tick(**x)['actions'].tobytes() == want.numpy().tobytes()


@pytest.mark.parametrize(('factory', 'options'), [*((f, {}) for f in WORKING), *MORE.items()])
def test_p1_state_put_back_repeats_the_outputs_to_the_byte(factory, options):
    policy = live(factory, options=options)
    for at in (0, 1, 5):
        policy.returns(xs(), at)


@pytest.mark.parametrize(('factory', 'options'), [*((f, {}) for f in WORKING), *MORE.items()])
def test_p3_each_buffer_of_state_is_load_bearing(factory, options):
    policy = live(factory, options=options)
    for name in sorted(states(policy) - {'table'}):
        policy.wipe()
        for x in xs(5):
            policy.tick(**x)
        saved = policy.state()
        want = [policy.tick(**x)['actions'].tobytes() for x in xs(3, 2)]
        policy.put(saved)
        if name == 'own':
            policy.b[name][...] = torch.Generator().manual_seed(9).get_state().numpy()
        elif name.endswith('.count'):
            policy.b[name][...] -= 1
        else:
            policy.b[name][...] = 0
        try:
            got = [policy.tick(**x)['actions'].tobytes() for x in xs(3, 2)]
        except Refusal:
            continue  # lengths that do not belong together
        assert got != want, name


@pytest.mark.parametrize('factory', WORKING)
def test_p20_registered_buffers_are_state(factory):
    assert states(live(factory)) == WORKING[factory]


def test_state_starts_as_the_factory_made_it():
    policy = live('cell')
    assert (policy.b['h'] == 0.25).all()
    policy.tick(obs=1)
    assert not (policy.b['h'] == 0.25).any()


def test_a_constant_buffer_is_left_out_and_watched():
    policy = live('in_place', options={'constants': ['tab*']})
    assert states(policy) == {'h', 'n'}
    assert 'table' in policy.policy.hidden()
    assert "'nope'" in refusal('cell', options={'constants': ['nope']}).message


@pytest.mark.parametrize(('factory', 'options', 'words'), [
    ('previous', {}, 'last: {kind: optional, dtype: F32, shape: [1, 4]}'),
    ('window', {}, 'window: {kind: deque, dtype: F32, shape: [1, 4], length: 3}'),
    ('window', {'declare': {'window': WINDOW['declare']['window']}}, 'count: {kind: int}'),
    ('ensembled', {}, 'ensembler.actions'),
    ('ensembled', {'declare': {'ensembler.actions': ENSEMBLE['declare']['ensembler.actions']}},
     'ensembler.weight'),
    ('noisy', {'source': 'own'}, 'own: {kind: generator}'),
    ('noisy', {'source': 'torch'}, "torch's global generator"),
    ('noisy', {'source': 'random'}, 'global generator of random'),
    ('noisy', {'source': 'numpy'}, 'global generator of numpy.random'),
    ('noisy', {'source': 'global'}, 'own_modules.CACHE'),
    ('noisy', {'source': 'iterator'}, 'steps (count)'),
])
def test_p20_undeclared_state_is_refused_by_name_with_what_to_write(factory, options, words):
    e = refusal(factory, options=options)
    assert e.code is Code.UNDECLARED_STATE
    assert words in e.message


@pytest.mark.parametrize(('factory', 'code', 'words'), [
    ('alias', Code.UNSUPPORTED, 'a and b came to share memory'),
    ('remembers', Code.UNSUPPORTED, 'came to share memory'),
    ('tied', Code.UNSUPPORTED, 'a and b share memory'),
    ('writes_input', Code.UNSUPPORTED, 'input obs is written in place'),
    ('grows', Code.BACKEND, 'h became torch.float32 (2, 4)'),
    ('nothing', Code.INVALID_POLICY_FILE, 'returned int'),
])
def test_p20_what_no_buffer_can_hold_is_refused_by_name(factory, code, words):
    e = refusal(factory)
    assert words in e.message
    assert e.code is code


@pytest.mark.parametrize(('declare', 'words'), [
    ({'nope': {'kind': 'int'}}, "no attribute 'nope'"),
    ({'h': {'kind': 'int'}}, 'is Tensor, which kind int does not hold'),
    ({'h': {'kind': 'magic'}}, 'one of tensor, optional'),
    ({'h': {'kind': 'optional'}}, 'write shape and dtype'),
    ({'h': {'kind': 'rows', 'shape': [4], 'axis': 3}}, 'an axis within the shape'),
])
def test_a_wrong_declaration_is_refused_by_name(declare, words):
    e = refusal('cell', options={'declare': declare})
    assert e.code is Code.INVALID_POLICY_FILE
    assert words in e.message


@pytest.mark.parametrize(('spec', 'words'), [
    ({'shapes': {}}, 'policy.shapes: {obs: [1, …]}'),
    ({'shapes': {'obs': (1, 4), 'x': (1,)}}, 'policy.shapes.x'),
    ({'options': {'threads': 0}}, 'at least 1'),
    ({'options': {'seeed': 1}}, 'seeed'),
    ({'options': {'dtypes': {'obs': 'float'}}}, "'float' is none of"),
    ({'options': {'outputs': ['a', 'b']}}, 'for 1 outputs'),
    ({'state': {'obs': 'nope'}}, "no output 'nope'"),
])
def test_what_is_wrong_in_the_policy_file_is_said(spec, words):
    assert words in refusal('cell', **spec).message


def test_finding_out_leaves_the_object_as_the_factory_made_it():
    policy = live('window', options=WINDOW)
    made = policy.policy.program.root
    policy.policy.program._probe()
    assert (len(made.window), made.count) == (0, 0)
    cell = live('cell').policy.program
    cell._probe()
    assert (cell.root.h == 0.25).all()


def test_finding_out_leaves_no_trace():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(Refusal):
        live('noisy', options={'source': 'torch'})
    assert torch.equal(torch.get_rng_state(), before)


def test_p20_ticks_change_nothing_that_is_not_a_buffer():
    for factory, options in MORE.items():
        policy = live(factory, options=options)
        before = policy.policy.hidden()
        for x in xs(5):
            policy.tick(**x)
        assert policy.policy.hidden() == before


def test_a_program_that_raises_is_refused_and_serves_the_next_tick():
    policy = live('raises')
    with pytest.raises(Refusal, match='ValueError: seven') as e:
        policy.tick(obs=7)
    assert e.value.code is Code.BACKEND
    assert (policy.tick(obs=1)['actions'] == 2).all()


def test_an_output_that_changes_its_shape_is_refused_not_broadcast():
    policy = live('shrinks')
    with pytest.raises(Refusal, match='output actions is'):
        policy.tick(obs=99)


def test_a_module_without_registration_is_found_inside_an_object():
    policy = live('window_with_net', options=WINDOW)
    assert states(policy) == {'window', 'window.count', 'count', 'net.h'}
    policy.returns(xs(), 4)


def test_prefill_takes_in_a_prompt():
    policy = live('prompted', shapes={'obs': (1, 4), 'prompt': (1, 4)},
                  options={'dtypes': {'prompt': 'U8'}})
    policy.b['prompt'][...] = 3
    policy.bound.prefill()
    policy.b['prompt'][...] = 9
    assert (policy.tick(obs=1)['actions'] == 4).all()
    assert not hasattr(live('cell').bound, 'prefill')


def test_two_live_sets_of_one_module_do_not_touch_each_other():
    from flashrt_ros.core.arena import Arena
    policy = live('cell')
    other = Arena(policy.device, policy.layout)
    bound = policy.policy.bind(other.buffers, policy.device)
    policy.wipe()
    first = policy.tick(obs=1)['actions']
    other.buffers['h'].array[...] = 5
    bound.enqueue()
    policy.wipe()
    np.testing.assert_array_equal(policy.tick(obs=1)['actions'], first)


def test_weights_come_from_safetensors_only(tmp_path):
    from safetensors.torch import save_file

    from test.backends.own_modules import Cell
    path = tmp_path / 'w.safetensors'
    save_file({'w': torch.eye(4), 'h': torch.zeros(1, 4)}, path)
    policy = live('cell', model=path, model_root=tmp_path)
    assert not policy.b['h'].any()
    np.testing.assert_allclose(policy.tick(obs=1)['actions'], 2 * np.tanh(1), atol=1e-6)
    first = policy.policy.identity()[0]['weights']
    save_file({'w': 2 * torch.eye(4), 'h': torch.zeros(1, 4)}, path)
    assert live('cell', model=path, model_root=tmp_path).policy.identity()[0]['weights'] != first
    save_file({'w': torch.eye(4)}, path)
    assert 'does not fit' in refusal('cell', model=path, model_root=tmp_path).message
    torch.save(Cell().state_dict(), tmp_path / 'w.pt')
    e = refusal('cell', model=tmp_path / 'w.pt', model_root=tmp_path)
    assert 'would run code' in e.message


def test_p8_weights_and_settings_tell_policies_apart():
    def fields(**spec):
        return live('cell', **spec).policy.identity()
    meaning, exactness = fields()
    assert fields() == (meaning, exactness)
    assert fields(options={'seed': 1})[0] != meaning
    assert fields(options={'threads': 2})[0] == meaning
    assert fields(options={'threads': 2})[1] != exactness
    assert fields(exact=False)[1] != exactness
    assert exactness['torch'] == torch.__version__


def test_p8_the_source_of_factory_and_modules_is_part_of_the_weights(tmp_path, monkeypatch):
    source = tmp_path / 'made_here.py'
    source.write_text('import torch\ndef make(): return torch.nn.Linear(4, 2, bias=False)\n')
    monkeypatch.syspath_prepend(str(tmp_path))

    def weights():
        torch.manual_seed(0)
        return Live('torch', factory='made_here:make', modules=('made_here',),
                    shapes={'input': (1, 4)}).policy.identity()[0]['weights']
    first = weights()
    assert weights() == first
    source.write_text(source.read_text() + '# another line\n')
    assert weights() != first


def test_the_process_keeps_its_own_settings_after_close():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    policy = live('cell', options={'threads': before[0] + 1})
    policy.tick(obs=1)
    assert torch.get_num_threads() == before[0] + 1
    policy.policy.close()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
