"""Policy files that want to harm, and files that are none: a refusal, in little time and memory."""
from __future__ import annotations

import os
from pathlib import Path
import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import pytest
import yaml

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest import yaml_file
from flashrt_ros.ingest.policy_file import load
from test.ingest.policies import ARM, write

LAUGHS = 'a0: &a0 [x, x]\n' + ''.join(
    f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 9)}]\n' for i in range(1, 12))
MERGES = 'b0: &b0 {k: 1}\n' + ''.join(
    f'b{i}: &b{i} {{<<: [{", ".join([f"*b{i - 1}"] * 9)}]}}\n' for i in range(1, 12))
CHAIN = 'c0: &c0 [x]\n' + ''.join(f'c{i}: &c{i} [*c{i - 1}]\n' for i in range(1, 3000))

HOSTILE = {
    'aliases that unfold': (LAUGHS, 'use fewer aliases'),
    'merge keys that unfold': (MERGES, 'use fewer aliases'),
    'a chain of aliases': (CHAIN, 'use fewer aliases'),
    'an alias of itself': ('a: &a [*a]', 'holds an alias of itself'),
    'a mapping in itself': ('a: &a {b: *a}', 'holds an alias of itself'),
    'deep lists': ('a: ' + '[' * 5000 + ']' * 5000, 'nested too deeply'),
    'deep blocks': ('\n'.join(' ' * i + 'a:' for i in range(400)), 'nested too deeply'),
    'a key twice': ('policy: {}\npolicy: {}', "line 2: the key 'policy' is written twice"),
    'a key twice inside': ('policy: {backend: onnx, backend: torch}', 'is written twice'),
    'a number as key': ('1: 2', "the key '1' is not text"),
    'a list as key': ('[1]: 2', 'is not text'),
    'a truth value as key': ('on: 2', "the key 'on' is not text; put it in quotes"),
    'a python object': ('a: !!python/object/apply:os.system [id]', 'which a policy file does not'),
    'a python name': ('a: !!python/name:os.system', 'which a policy file does not use'),
    'an unknown tag': ('a: !thing {b: 1}', 'which a policy file does not use'),
    'a date': ('a: 2026-01-01', 'put text in quotes'),
    'binary data': ('a: !!binary aGk=', 'which a policy file does not use'),
    'a set': ('a: !!set {b}', 'which a policy file does not use'),
    'two documents': ('a: 1\n---\nb: 2', 'is not YAML'),
    'a merge of nothing': ('a: {<<: 3}', '<<: takes an alias of a mapping'),
    'a huge number': ('a: ' + '9' * 5000, 'no value that can be read'),
    'a list': ('[1, 2]', 'is not a mapping; start with policy:'),
    'a word': ('walk', 'is not a mapping'),
    'nothing': ('', 'is not a mapping'),
    'a comment': ('# nothing', 'is not a mapping'),
    'unclosed': ('a: [1, 2', 'is not YAML'),
    'a tab': ('a:\n\tb: 1', 'is not YAML'),
    'an unknown alias': ('a: *b', 'is not YAML'),
    'a control character': ('a: \x01', 'is not YAML'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    text, said = HOSTILE[name]
    began = time.process_time()
    with pytest.raises(Refusal) as caught:
        load(write(tmp_path, text))
    assert caught.value.code is Code.INVALID_POLICY_FILE
    assert caught.value.message.startswith('walk.yaml: ')
    assert said in caught.value.message
    assert time.process_time() - began < 10.0


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / 'walk.yaml'
    with path.open('wb') as file:
        file.truncate(1 << 40)           # a sparse terabyte
    with pytest.raises(Refusal, match='is larger than'):
        load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / 'pipe')
    for path in (tmp_path / 'absent.yaml', tmp_path, tmp_path / 'pipe', Path('/dev/zero'),
                 tmp_path / ('x' * 5000), Path('a\0b')):
        with pytest.raises(Refusal) as caught:
            load(path)
        assert caught.value.code is Code.INVALID_POLICY_FILE


@pytest.mark.parametrize('data', [b'\xff\xfe\x00', b'a: \xc3\x28', 'a: ü'.encode('latin-1')])
def test_text_that_is_not_utf_8_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / 'walk.yaml'
    path.write_bytes(data)
    with pytest.raises(Refusal, match='is not UTF-8 text'):
        load(path)


def test_anchors_of_everyday_size_are_fine() -> None:
    text = 'legs: &legs [' + ', '.join(f'j{i}' for i in range(30)) + ']\n' + ''.join(
        f't{i}: *legs\n' for i in range(100))
    assert len(yaml_file.parse(text.encode(), 'x')) == 101


def assert_loaded_or_refused(path: Path) -> None:
    """Whatever else is raised fails the test by itself."""
    refusal = None
    try:
        load(path)
    except Refusal as found:
        refusal = found
    assert refusal is None or refusal.code is Code.INVALID_POLICY_FILE
    assert refusal is None or refusal.message.startswith('walk.yaml: ')


VALID = yaml.safe_dump(ARM, sort_keys=False)
WORDS = ('policy', 'inputs', 'term', 'hip', '0.25', 'true', 'null', '[', ']', '{', '}', ': ', '- ',
         '&a ', '*a', '!!', '-1', '.nan', '.inf', '\n', '  ', '"', 'hold', '<<: ', '1e400')


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow,
                                                                  HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 12),
                               st.sampled_from(WORDS)), min_size=1, max_size=4))
def test_a_damaged_file_is_loaded_or_refused_and_nothing_else(
        tmp_path: Path, cuts: list[tuple[int, int, str]]) -> None:
    text = VALID
    for at, length, word in cuts:
        text = text[:at] + word + text[at + length:]
    assert_loaded_or_refused(write(tmp_path, text))


LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(
    ('hold', 'hip', 'timer', 'position', ''))
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(('do', 'max', 'input', 'x')), inner, max_size=3), max_leaves=6)


def _paths(node: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    found = [path] if path else []
    if isinstance(node, dict):
        for key, value in node.items():
            found += _paths(value, (*path, key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            found += _paths(value, (*path, i))
    return found


@settings(max_examples=100, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(_paths(ARM)), value=PLAIN)
def test_any_value_at_any_place_is_loaded_or_refused_and_nothing_else(
        tmp_path: Path, path: tuple[object, ...], value: object) -> None:
    data = yaml.safe_load(VALID)
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert_loaded_or_refused(write(tmp_path, data))
