"""From named tensors to buffers: names, feedback pairs, and pairs that somebody forgot."""
from __future__ import annotations

import pytest

from flashrt_ros.backends.ports import TensorInfo, buffer_name, port_specs, suggest_pairs
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role


def t(name: str, shape=(1, 4), dtype='F32') -> TensorInfo:
    return TensorInfo(name, shape, dtype)


@pytest.mark.parametrize(('i', 'o'), [
    ('h_in', 'h_out'), ('hidden', 'hidden_out'), ('hidden', 'new_hidden'), ('state', 'next_state'),
    ('h0', 'hn'), ('h_0', 'h_n'), ('past.0.key', 'present.0.key'), ('prevState', 'newState'),
    ('past_key_values.3.value', 'present.3.value'), ('x', 'x'), ('hidden', '87'),
    ('state_in_0', 'state_out_0'), ('kv_cache', 'updated_kv_cache'), ('lstm_hx', 'output_2')])
def test_p20_a_forgotten_pair_is_suggested(i, o):
    assert suggest_pairs([t('obs', (1, 9)), t(i)], [t('actions', (1, 2)), t(o)]) == [(i, o)]


@pytest.mark.parametrize(('i', 'o'), [
    ('obs', 'actions'), ('input', 'output'), ('in_0', 'out_0'), ('last_action', 'action'),
    ('command', 'value')])
def test_ordinary_inputs_are_not_taken_for_state(i, o):
    assert suggest_pairs([t(i)], [t(o)]) == []


def test_pairs_have_equal_shape_and_type():
    assert suggest_pairs([t('h_in')], [t('h_out', (1, 5))]) == []
    assert suggest_pairs([t('h_in')], [t('h_out', dtype='F16')]) == []


def test_several_pairs_are_matched_by_name_not_by_order():
    assert suggest_pairs([t('h_in'), t('c_in')], [t('c_out'), t('h_out')]) == [
        ('h_in', 'h_out'), ('c_in', 'c_out')]


@pytest.mark.parametrize(('raw', 'name'), [
    ('obs', 'obs'), ('/actor/Tanh_output_0', 'actor/Tanh_output_0'), ('onnx::Gemm_0',
                                                                      'onnx::Gemm_0'),
    ('a b', 'a_b'), ('naïve', 'na_ve'), ('///', '_'), ('498', '498')])
def test_odd_names_become_names_that_a_buffer_may_have(raw, name):
    assert buffer_name(raw) == name
    port_specs([t(name)], [t('y')], {})


def test_a_pair_becomes_one_state_buffer_named_by_the_input():
    specs = {s.name: s.role for s in port_specs([t('obs'), t('h_in')], [t('a'), t('h_out')],
                                                {'h_in': 'h_out'})}
    assert specs == {'obs': Role.INPUT, 'h_in': Role.STATE, 'a': Role.OUTPUT}


def test_a_fed_back_output_stays_a_port_where_it_is_an_action_or_published():
    specs = port_specs([t('prev'), t('h_in')], [t('actions'), t('h_out')],
                       {'prev': 'actions', 'h_in': 'h_out'}, publish=['h_out'])
    assert [s.name for s in specs if s.role is Role.OUTPUT] == ['actions', 'h_out']


@pytest.mark.parametrize(('kwargs', 'code', 'words'), [
    ({'state': {}}, Code.UNDECLARED_STATE, 'state: {h_in: h_out}'),
    ({'state': {'nope': 'h_out'}}, Code.INVALID_POLICY_FILE, "no input 'nope'"),
    ({'state': {'h_in': 'nope'}}, Code.INVALID_POLICY_FILE, "no output 'nope'"),
    ({'state': {'h_in': 'a'}}, Code.INVALID_POLICY_FILE, 'equal type and shape'),
    ({'state': {}, 'stateless': ['h']}, Code.INVALID_POLICY_FILE, "no input 'h'"),
    ({'state': {'h_in': 'h_out'}, 'ranges': {'obs': [1, 0]}}, Code.INVALID_POLICY_FILE,
     'must be [low, high]'),
    ({'state': {'h_in': 'h_out'}, 'publish': ['obs']}, Code.INVALID_POLICY_FILE, "no output 'obs'"),
])
def test_p20_what_does_not_fit_is_refused_by_name(kwargs, code, words):
    with pytest.raises(Refusal) as e:
        port_specs([t('obs', (1, 3)), t('h_in')], [t('a', (1, 2)), t('h_out')], **kwargs)
    assert e.value.code is code
    assert words in e.value.message


def test_one_pair_of_two_is_not_enough():
    with pytest.raises(Refusal, match='input c_in looks like state that output c_out'):
        port_specs([t('h_in'), t('c_in')], [t('h_out'), t('c_out'), t('a', (1, 2))],
                   {'h_in': 'h_out'})


def test_an_ordinary_input_may_be_declared_as_such():
    specs = port_specs([t('h_in')], [t('h_out')], {}, stateless=['h_in'],
                       ranges={'h_in': [-2, 2]})
    assert (specs[0].role, specs[0].low, specs[0].high) == (Role.INPUT, -2.0, 2.0)


def test_two_names_that_become_one_are_refused():
    with pytest.raises(Refusal, match="named 'a_b'"):
        port_specs([t(buffer_name('a b')), t(buffer_name('a?b'))], [t('y')], {})
