"""Choosing a backend by name, and factories: who may supply code, and what they must return."""
from __future__ import annotations

import subprocess
import sys

import pytest

from flashrt_ros.backends import MODULES, load
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal
from test.backends.live import Live

OWN = 'test.backends.own_policies'


def refusal(backend: str = 'host', **spec) -> Refusal:
    with pytest.raises(Refusal) as e:
        load(backend, PolicySpec(**spec))
    return e.value


def test_an_unknown_backend_is_refused_with_the_known_ones():
    e = refusal('tensorflow')
    assert e.code is Code.INVALID_POLICY_FILE
    assert all(name in e.message for name in MODULES)


def test_importing_the_package_imports_no_optional_library():
    code = ('import sys, flashrt_ros.backends, flashrt_ros.backends.host_model\n'
            'print([m for m in ("onnx", "onnxruntime", "torch", "tensorrt", "cuda", "rclpy") '
            'if m in sys.modules])')
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[]'


def test_a_factory_gets_the_options_as_arguments():
    policy, _ = load('host', PolicySpec(factory=f'{OWN}:plain', modules=(OWN,),
                                        options={'obs_dim': 5}))
    assert policy.layout()['obs'].shape == (5,)


def test_a_module_that_is_not_listed_supplies_no_code():
    e = refusal(factory=f'{OWN}:plain', modules=('test.backends.own',))
    assert (e.code, 'python_modules' in e.message) == (Code.INVALID_POLICY_FILE, True)
    assert 'os' in refusal(factory='os:getcwd').message


def test_a_listed_package_covers_its_modules():
    load('host', PolicySpec(factory=f'{OWN}:plain', modules=('test',)))


@pytest.mark.parametrize(('factory', 'code', 'words'), [
    (None, Code.INVALID_POLICY_FILE, 'module:function'),
    ('plain', Code.INVALID_POLICY_FILE, 'not of the form'),
    (f'{OWN}:a.b', Code.INVALID_POLICY_FILE, 'not of the form'),
    (f'{OWN}:absent', Code.INVALID_POLICY_FILE, "no function 'absent'"),
    (f'{OWN}:not_callable', Code.INVALID_POLICY_FILE, "no function 'not_callable'"),
    ('test.backends.nowhere:f', Code.INVALID_POLICY_FILE, 'not installed'),
    (f'{OWN}:fails', Code.BACKEND, 'RuntimeError: no camera'),
    (f'{OWN}:wrong_kind', Code.INVALID_POLICY_FILE, 'without layout, identity'),
])
def test_what_is_wrong_with_a_factory_is_said(factory, code, words):
    e = refusal(factory=factory, modules=('test',))
    assert e.code is code
    assert words in e.message


def test_an_unknown_option_is_refused_with_the_factory_and_its_options():
    e = refusal(factory='flashrt_ros.backends.reference:chunked', options={'horizonn': 3})
    assert 'horizonn' in e.message
    assert e.code is Code.BACKEND


def test_feedback_pairs_belong_to_models():
    assert 'policy.state' in refusal(factory=f'{OWN}:plain', modules=('test',),
                                     state={'a': 'b'}).message


def test_p8_the_source_and_the_model_file_are_part_of_the_weights(tmp_path):
    (tmp_path / 'mod_a.py').write_text(
        'from flashrt_ros.backends.reference import Recurrent\n'
        'def make(model=None): return Recurrent()\n')
    weights = tmp_path / 'w.bin'
    weights.write_bytes(b'1')
    sys.path.insert(0, str(tmp_path))
    try:
        def digest(**spec):
            policy, _ = load('host', PolicySpec(factory='mod_a:make', modules=('mod_a',), **spec))
            return policy.identity()[0]['weights']
        first, with_model = digest(), digest(model=weights)
        weights.write_bytes(b'2')
        changed_model = digest(model=weights)
        source = tmp_path / 'mod_a.py'
        source.write_text(source.read_text() + '# another line\n')
        assert len({first, with_model, changed_model, digest()}) == 4
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop('mod_a', None)


def test_p20_a_draw_from_the_process_generator_shows_in_hidden():
    policy = Live('host', factory=f'{OWN}:draws', modules=('test',))
    before = policy.policy.hidden()
    policy.tick(obs=0)
    changed = [k for k, v in policy.policy.hidden().items() if before[k] != v]
    assert changed == ['global generator of random']


@pytest.mark.parametrize(('library', 'backend', 'extra'), [
    ('torch', 'torch', 'flashrt_ros[torch]'), ('onnxruntime', 'onnx', 'flashrt_ros[onnx]'),
    ('onnx', 'onnx', 'flashrt_ros[onnx]')])
def test_a_missing_library_is_refused_with_how_to_install_it(library, backend, extra):
    code = (f'import sys; sys.modules[{library!r}] = None\n'
            'from flashrt_ros.backends import load\n'
            'from flashrt_ros.backends.spec import PolicySpec\n'
            'from flashrt_ros.core.errors import Refusal\n'
            'factory = "flashrt_ros.backends.reference:recurrent"\n'
            'try: load(sys.argv[1], PolicySpec(factory=factory))\n'
            'except Refusal as e: print(e)\n')
    out = subprocess.run([sys.executable, '-c', code, backend], capture_output=True, text=True,
                         check=True)
    assert out.stdout.startswith('UNSUPPORTED')
    assert extra in out.stdout
